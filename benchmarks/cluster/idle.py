"""A rank whose worker only receives: what is measured over it is the way there and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from agentrl.trainer.launch.rank_plan import RankPlace
from agentrl.types import Sample, TrainBatch


class IdlePlan:
    """A plan of one rank whose worker only receives."""

    world_size = 1

    @contextmanager
    def worker(self, place: RankPlace) -> Iterator[IdleWorker]:
        """The worker."""
        del place
        yield IdleWorker()


class IdleWorker:
    """Receives a batch."""

    def take(self, batch: TrainBatch) -> int:
        """The number of its samples."""
        return len(batch.samples)

    def num_views(self, batch: TrainBatch) -> int:
        """How many arrays of its samples are memory of the object store, rather than copies (count)."""
        return sum(not array.flags.owndata for sample in batch.samples for array in arrays_of(sample))


def arrays_of(sample: Sample) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    """The arrays of a sample."""
    return [
        *(sample.token_ids, sample.author, sample.loss_mask, sample.logprobs, sample.versions),
        *(sample.turns, sample.temperatures),
    ]
