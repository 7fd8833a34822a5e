"""Packed rows for a layout: padded, and cut over the context ranks.

A row of T tokens holds whole sequences end to end. Under context parallelism a sequence is cut into 2 x C
equal pieces and rank r of C has pieces r and 2C - 1 - r, so that the attention of all ranks costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.trainer.batch import EMPTY_ROW, MicroBatch

Int64Array = npt.NDArray[np.int64]


class Ahead(NamedTuple):
    """What this rank's tokens predict beyond the next token, k further ahead.

    input_ids_t: the token k after each of its own; 0 = none of its sequence is. chosen_n, predictor_n: as in
    `RowShard`, of those among its N that have such a predictor.
    """

    input_ids_t: Int64Array
    chosen_n: Int64Array
    predictor_n: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class RowShard:
    """A micro-batch on one context rank. t: its own tokens, n: those of its tokens that predict one.

    bounds: the starts of the sequences in the unsharded, padded row, and its end. chosen_n: the indices of
    the predicted tokens on this rank among the micro-batch's N. predictor_n: the indices of the tokens of
    this rank that predict them. index_t: of its own tokens in the micro-batch; -1 = padding. ahead: for k of
    1, 2 and so on.
    """

    micro_batch: MicroBatch
    bounds: tuple[int, ...]
    input_ids_t: Int64Array
    position_ids_t: Int64Array
    chosen_n: Int64Array
    predictor_n: Int64Array
    index_t: Int64Array
    ahead: tuple[Ahead, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence of the unsharded row, with padding."""
        return tuple(stop - start for start, stop in pairwise(self.bounds))


def pieces_of(length: int, ranks: int, rank: int) -> Int64Array:
    """A context rank's positions of a sequence, in its order. length: a multiple of 2 x ranks."""
    pieces = np.arange(length).reshape(2 * ranks, -1)
    return np.concatenate([pieces[rank], pieces[2 * ranks - 1 - rank]])


def gathered_places(lengths: Sequence[int], ranks: int) -> Int64Array:
    """Of each token of an unsharded row its place among those of all context ranks, one after the other.

    lengths: of the row's sequences, each a multiple of 2 x ranks.
    """
    total, start = sum(lengths), 0
    places = np.empty(total, np.int64)
    for length in lengths:
        positions = np.concatenate([pieces_of(length, ranks, rank) for rank in range(ranks)])
        # Of each rank's tokens, those of the sequences before come first.
        own = start // ranks + np.arange(length // ranks)
        places[start + positions] = (np.arange(ranks)[:, None] * (total // ranks) + own).flatten()
        start += length
    return places


class Cut(NamedTuple):
    """The padding and the cut of rows. ranks, rank: of the context. min_tokens: of a padded row. ahead: how
    many tokens after the next one are predicted."""

    sequence_multiple: int
    row_multiple: int
    ranks: int
    rank: int
    min_tokens: int = 0
    ahead: int = 0

    def padded_length(self, micro: MicroBatch) -> int:
        """Tokens of the unsharded row, with padding."""
        tokens = sum(_round_up(length, self.sequence_multiple) for length in micro.lengths)
        return _round_up(max(tokens, self.min_tokens), self.row_multiple)


def shard_of(micro: MicroBatch, cut: Cut) -> RowShard:
    """This context rank's shard of a micro-batch.

    A sequence is padded at its end, where no predicted token attends to it; the row is padded by one more
    sequence without predicted tokens.
    """
    ranks, rank = cut.ranks, cut.rank
    lengths = [_round_up(length, cut.sequence_multiple) for length in micro.lengths]
    num_missing = cut.padded_length(micro) - sum(lengths)
    bounds = np.cumsum([0, *lengths, *([num_missing] if num_missing else [])])
    # The index of each token of the micro-batch in the padded row.
    starts = np.cumsum([0, *micro.lengths[:-1]])
    shift = np.repeat(bounds[: len(lengths)] - starts, micro.lengths)
    padded_index = np.arange(len(micro.input_ids_T)) + shift
    ids, index = np.zeros(bounds[-1], np.int64), np.full(bounds[-1], -1)
    ids[padded_index], index[padded_index] = micro.input_ids_T, np.arange(len(micro.input_ids_T))
    sizes = np.diff(bounds)
    own = np.concatenate(
        [start + pieces_of(size, ranks, rank) for start, size in zip(bounds, sizes, strict=False)]
        if ranks > 1
        else [np.arange(bounds[-1])]
    )
    shard_index = np.full(bounds[-1], -1)
    shard_index[own] = np.arange(len(own))
    places_T = shard_index[padded_index]
    predictors = places_T[micro.predictor_N]
    chosen = np.flatnonzero(predictors >= 0)
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    remaining = np.repeat(sizes, sizes) - positions
    return RowShard(
        micro_batch=micro,
        bounds=tuple(int(bound) for bound in bounds),
        input_ids_t=ids[own],
        position_ids_t=positions[own],
        chosen_n=chosen,
        predictor_n=predictors[chosen],
        index_t=index[own],
        ahead=tuple(
            _ahead(micro, k, places_T, np.where(remaining > k, np.roll(ids, -k), 0)[own])
            for k in range(1, cut.ahead + 1)
        ),
    )


def _ahead(micro: MicroBatch, k: int, places_T: Int64Array, following_t: Int64Array) -> Ahead:
    """places_T: of the micro-batch's tokens on this rank, -1 = on another. following_t: see `input_ids_t`."""
    # What would be predicted from before the beginning of its sequence is left out.
    (far,) = np.nonzero(micro.position_ids_T[micro.predictor_N] >= k)
    predictors = places_T[micro.predictor_N[far] - k]
    is_own = predictors >= 0
    return Ahead(following_t, far[is_own], predictors[is_own])


def padded(rows: Sequence[MicroBatch], count_multiple: int) -> tuple[MicroBatch, ...]:
    """The rows, padded with rows without predicted tokens to a multiple of `count_multiple` above 0.

    A pipeline of virtual stages processes as many rows at a time as it has ranks.
    """
    size = max(_round_up(len(rows), count_multiple), count_multiple)
    return (*rows, *[EMPTY_ROW] * (size - len(rows)))


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
