"""Samples of a batch, changed by a function before the credit, or once models have scored them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from agentrl.types import Extra, Group, Sample, Scores

Conversion: TypeAlias = Callable[[Sequence[Group], Sequence[Sample]], Sequence[Sample]]
"""From the groups of a batch and their samples to samples that have less under the loss mask, or more extras.

As many samples in the same order, with the same tokens. `sample.rollout_id.episode` is the id of the episode,
whose `task.metadata` are those of the row.
"""

DataPostProcess: TypeAlias = Callable[[Sequence[Sample], Scores], Sequence[Sample]]
"""The same from all samples of a batch, and what models say of their tokens."""

_RECORDED = ("token_ids", "author", "logprobs", "versions", "turns", "temperatures")


def converted(function: Conversion, groups: Sequence[Group], samples: Sequence[Sample]) -> list[Sample]:
    """The samples that a conversion returns. samples: of all groups, in their order.

    Raises:
        ValueError: it returned another number of samples, changed what was recorded, put a token under the
            loss mask that was not, or dropped an extra.
    """
    return _kept(function(groups, samples), samples)


def post_processed_data(function: DataPostProcess, samples: Sequence[Sample], scores: Scores) -> list[Sample]:
    """The samples that a post-processing of data returns.

    Raises:
        ValueError: as `converted`.
    """
    return _kept(function(samples, scores), samples)


def _kept(returned: Sequence[Sample], samples: Sequence[Sample]) -> list[Sample]:
    """What a function returned for samples, which it may change in the two ways alone."""
    is_samples = isinstance(returned, Sequence) and all(isinstance(sample, Sample) for sample in returned)
    if not is_samples or len(returned) != len(samples):
        what = f"{len(returned)} samples" if is_samples else repr(returned)[:80]
        raise ValueError(f"it returns {len(samples)} samples, one for each, not {what}")
    for before, after in zip(samples, returned, strict=True):
        _check_kept(before, after)
    return list(returned)


def _check_kept(before: Sample, after: Sample) -> None:
    """Check that a sample has what was recorded."""
    if after is before:
        return
    id = before.rollout_id
    if after.rollout_id != id:
        raise ValueError(f"the samples are in another order: {after.rollout_id} is in place of {id}")
    arrays = ((name, getattr(before, name), getattr(after, name)) for name in _RECORDED)
    if changed := [name for name, one, other in arrays if not np.array_equal(one, other)]:
        raise ValueError(f"the {changed[0]} of a sample of {id} have changed; only loss_mask and extras may")
    if np.any(after.loss_mask & ~before.loss_mask):
        raise ValueError(f"a token of {id} came under the loss mask that was not under it")
    if dropped := before.extras.keys() - after.extras.keys():
        raise ValueError(f"the extra {min(dropped)!r} of {id} is gone; keep it")
    if after.privileged_ids is not before.privileged_ids:
        raise ValueError(f"the privileged_ids of {id} have changed; keep them")


def train_metadata(groups: Sequence[Group], samples: Sequence[Sample]) -> list[Sample]:
    """A conversion that gives each token the numbers in `train_metadata` of its row's metadata, as extras.

    A custom loss reads them by their names (slime's `train_metadata`).

    Raises:
        ValueError: a row has something else there.
    """
    rows = {e.id: e.task.metadata.get("train_metadata", {}) for group in groups for e in group.episodes}
    made: list[Sample] = []
    for sample in samples:
        numbers = rows[sample.rollout_id.episode]
        if not isinstance(numbers, dict) or not all(isinstance(n, int | float) for n in numbers.values()):
            raise ValueError(
                f"the row of {sample.rollout_id} has other things than numbers by name in `train_metadata`"
            )
        own = {name: Extra.dense(np.full(len(sample), n, np.float32)) for name, n in numbers.items()}
        made.append(replace(sample, extras={**sample.extras, **own}))
    return made
