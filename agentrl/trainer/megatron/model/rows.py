"""Packed rows as a layout wants them: filled up, and cut over the context ranks.

A row of T tokens holds whole sequences end to end. Under context parallelism a sequence is cut into 2 x C
equal pieces and rank r of C has pieces r and 2C - 1 - r, so that all ranks have as much to look back at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.trainer.batch import MicroBatch

Int64Array = npt.NDArray[np.int64]


# One token, of no sample's, that nothing is predicted from.
_NOTHING = MicroBatch(
    members=(0,),
    positions=(np.zeros(0, np.int64),),
    lengths=(1,),
    input_ids_T=np.zeros(1, np.int64),
    position_ids_T=np.zeros(1, np.int64),
    predictor_N=np.zeros(0, np.int64),
    targets_N=np.zeros(0, np.int64),
    temperature_N=np.zeros(0),
)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A micro-batch on one context rank. t: its own tokens, n: those of its tokens that predict one.

    bounds: where the sequences begin in the whole row, filled up, and where it ends. chosen_n: which of the
    micro-batch's N predicted tokens are predicted here, and predictor_n: by which of this rank's tokens.
    """

    whole: MicroBatch
    bounds: tuple[int, ...]
    input_ids_t: Int64Array
    position_ids_t: Int64Array
    chosen_n: Int64Array
    predictor_n: Int64Array

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, filled up."""
        return int(np.diff(self.bounds).max())


def pieces_of(length: int, ranks: int, rank: int) -> Int64Array:
    """Positions of a sequence that a context rank has, in its order. length: a multiple of 2 x ranks."""
    pieces = np.arange(length).reshape(2 * ranks, -1)
    return np.concatenate([pieces[rank], pieces[2 * ranks - 1 - rank]])


class Cut(NamedTuple):
    """How rows are filled up and cut. ranks, rank: of the context. least: tokens of a row."""

    sequence_multiple: int
    row_multiple: int
    ranks: int
    rank: int
    least: int = 0

    def filled(self, micro: MicroBatch) -> int:
        """Tokens of the whole row."""
        tokens = sum(_up_to(length, self.sequence_multiple) for length in micro.lengths)
        return _up_to(max(tokens, self.least), self.row_multiple)


def row_of(micro: MicroBatch, cut: Cut) -> Row:
    """A micro-batch as this context rank sees it.

    A sequence is filled up at its end, where nothing that counts looks; the row by one more sequence, that
    nothing is predicted from.
    """
    ranks, rank = cut.ranks, cut.rank
    lengths = [_up_to(length, cut.sequence_multiple) for length in micro.lengths]
    missing = cut.filled(micro) - sum(lengths)
    bounds = np.cumsum([0, *lengths, *([missing] if missing else [])])
    # Where each token of the micro-batch stands in the filled row, and where each filled place was.
    starts = np.cumsum([0, *micro.lengths[:-1]])
    shift = np.repeat(bounds[: len(lengths)] - starts, micro.lengths)
    placed = np.arange(len(micro.input_ids_T)) + shift
    ids = np.zeros(bounds[-1], np.int64)
    ids[placed] = micro.input_ids_T
    sizes = np.diff(bounds)
    mine = np.concatenate(
        [start + pieces_of(size, ranks, rank) for start, size in zip(bounds, sizes, strict=False)]
        if ranks > 1
        else [np.arange(bounds[-1])]
    )
    here = np.full(bounds[-1], -1)
    here[mine] = np.arange(len(mine))
    predictors = here[placed[micro.predictor_N]]
    chosen = np.flatnonzero(predictors >= 0)
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    return Row(
        whole=micro,
        bounds=tuple(int(bound) for bound in bounds),
        input_ids_t=ids[mine],
        position_ids_t=positions[mine],
        chosen_n=chosen,
        predictor_n=predictors[chosen],
    )


def filled_up(rows: Sequence[MicroBatch], count_multiple: int) -> tuple[MicroBatch, ...]:
    """The rows, and with them as many that predict nothing as make them at least one, and a multiple.

    A pipeline of virtual stages goes through as many rows at a time as it has ranks.
    """
    size = max(_up_to(len(rows), count_multiple), count_multiple)
    return (*rows, *[_NOTHING] * (size - len(rows)))


def _up_to(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
