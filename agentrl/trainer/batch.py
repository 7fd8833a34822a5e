"""Samples as flat rows: several sequences end to end, and which states predict which tokens.

T input tokens of a row, N predicted tokens of a row, S sequences in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError
from agentrl.types import (
    KEPT_IDS,
    REPLAYED_EXPERTS,
    ROUTED_EXPERTS,
    BoolArray,
    Extra,
    ExtraSpec,
    RoutedArray,
    Sample,
    joined_extras,
)


# Packing of ragged samples into rows, which go through the model together.
def pack(lengths: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Rows of indices into `lengths`, each of at most `max_tokens` tokens; every index once.

    Longest first, and a row is complete when the next one does not fit. Rows are flat, without padding, so
    an unfilled tail costs nothing. It matters that a row's sequences are of like length, which first-fit
    would prevent by filling tails with the shortest ones. A sequence longer than `max_tokens` gets a row of
    its own. The same lengths always give the same rows.

        pack([3, 5, 2, 2], max_tokens=6) -> ((1,), (0, 2), (3,))

    Raises:
        ValueError: `max_tokens` or a length is not positive.
    """
    if max_tokens < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"lengths and max_tokens must be at least 1, got {list(lengths)} and {max_tokens}")
    rows: list[tuple[int, ...]] = []
    row: list[int] = []
    filled = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if row and filled + lengths[index] > max_tokens:
            rows.append(tuple(row))
            row, filled = [], 0
        row.append(index)
        filled += lengths[index]
    return (*rows, tuple(row)) if row else tuple(rows)


Int64Array = npt.NDArray[np.int64]
_EXPERTS = (ROUTED_EXPERTS, REPLAYED_EXPERTS)
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """One row.

    members: S indices into the batch. positions: for each member, the positions of its predicted tokens.
    input_ids_T, position_ids_T: the members' tokens end to end, positions from 0 in each.
    predictor_N: the index into T of the state that predicts a token: that of the token before.
    kept_N: the token ids that it was sampled from (`KEPT_IDS`); None where all are of the whole vocabulary.
    routed_T, replayed_T: int16 [T, layers, k], the experts of each token (`ROUTED_EXPERTS`,
    `REPLAYED_EXPERTS`), -1 = unknown; None where all are.
    """

    members: tuple[int, ...]
    positions: tuple[Int64Array, ...]
    lengths: tuple[int, ...]
    input_ids_T: Int64Array
    position_ids_T: Int64Array
    predictor_N: Int64Array
    targets_N: Int64Array
    temperature_N: npt.NDArray[np.float64]
    kept_N: Extra | None = None
    routed_T: RoutedArray | None = None
    replayed_T: RoutedArray | None = None

    def gather(self, arrays: Sequence[npt.NDArray[Number]]) -> npt.NDArray[Number]:
        """The values at this row's predicted tokens, [N]. arrays: one per sample of the batch."""
        return np.concatenate([arrays[m][at] for m, at in zip(self.members, self.positions, strict=True)])

    def split(self, values: npt.NDArray[Number]) -> list[npt.NDArray[Number]]:
        """Values of the predicted tokens, [..., N], as one array for each member."""
        ends = np.cumsum([len(at) for at in self.positions])
        return np.split(values, ends[:-1], axis=-1)

    def extras(self, samples: Sequence[Sample]) -> dict[str, Extra]:
        """The extras of the batch at this row's predicted tokens, by name; padded where a sample has none.

        Experts of tokens are left out: they are for the layers of a network.

        Raises:
            ValueError: extras of one name differ in their declaration.
        """
        specs = {name: spec for name, spec in specs_of(samples).items() if name not in _EXPERTS}
        extras_by_member = [
            (len(at), {name: extra.take(at) for name, extra in samples[m].extras.items() if name in specs})
            for m, at in zip(self.members, self.positions, strict=True)
        ]
        # Every micro-batch has the same names: a loss must return the same metrics for each.
        size = sum(n for n, _ in extras_by_member)
        empty = {name: spec.empty(size) for name, spec in specs.items()}
        return {**empty, **joined_extras(extras_by_member)}


def by_sample(rows: Sequence[MicroBatch], values: npt.NDArray[Number]) -> dict[int, npt.NDArray[Number]]:
    """Values of the predicted tokens of rows (at least one), [..., N of all], by sample that has some."""
    ends = np.cumsum([len(row.predictor_N) for row in rows])
    parts = zip(rows, np.split(values, ends[:-1], axis=-1), strict=True)
    each = (pair for row, part in parts for pair in zip(row.members, row.split(part), strict=True))
    return {member: own for member, own in each if own.size}


EMPTY_ROW = MicroBatch(
    members=(0,),
    positions=(np.zeros(0, np.int64),),
    lengths=(1,),
    input_ids_T=np.zeros(1, np.int64),
    position_ids_T=np.zeros(1, np.int64),
    predictor_N=np.zeros(0, np.int64),
    targets_N=np.zeros(0, np.int64),
    temperature_N=np.zeros(0),
)
"""One token of no sample, and no predicted tokens: for ranks that have fewer rows than others."""

# The assignment of samples to replicas, balanced so that all finish at about the same time.
# A layer's matrices have 12 width^2 elements; on average a token attends to half of the sequence.
_MATRICES = 12


def shares_of(masks: Sequence[BoolArray], replicas: int, width: int) -> list[list[BoolArray]]:
    """The masks for each replica: each sample's mask for one replica, and an empty mask for the others.

    Greedy: samples are assigned by descending cost, each to the replica with the least load so far.
    """
    costs = [cost_of(mask, width) for mask in masks]
    owners, loads = [0] * len(masks), [0.0] * replicas
    for number in sorted(range(len(masks)), key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return [
        [mask if owner == replica else np.zeros_like(mask) for mask, owner in zip(masks, owners, strict=True)]
        for replica in range(replicas)
    ]


def cost_of(mask: BoolArray, width: int) -> float:
    """The cost of a sample, in tokens without context. width: of the model's states.

    A token costs 24 width^2 + 2 width x context operations a layer (https://arxiv.org/abs/2001.08361, table
    1, with N = 12 layers x width^2). A sample ends before its last predicted token.
    """
    at = np.flatnonzero(mask)
    tokens = int(at[-1]) if len(at) else 0
    return tokens * (1 + tokens / (_MATRICES * width))


def specs_of(samples: Sequence[Sample]) -> dict[str, ExtraSpec]:
    """The declaration of each extra that any of the samples has."""
    return {name: extra.spec for sample in samples for name, extra in sample.extras.items()}


def check_extras(samples: Sequence[Sample], required: Mapping[str, ExtraSpec]) -> None:
    """Check that the samples have the extras that a loss uses, as it declares them.

    Raises:
        UserError: one is missing, or declared in another way.
    """
    available = specs_of(samples)
    for name, spec in required.items():
        if name not in available:
            raise UserError(
                f"the loss uses the extra `{name}`, the engine gives {', '.join(available) or 'none'}; "
                "choose an engine that gives it, or another loss."
            )
        if available[name] != spec:
            raise UserError(
                f"the loss declares the extra `{name}` as {spec}, the engine gives {available[name]}; change "
                "what the loss declares."
            )


def check_sampled(samples: Iterable[Sample]) -> None:
    """Check that the probabilities of all samples are defined.

    Raises:
        ValueError: a sample was sampled greedily, so its probabilities have no temperature.
    """
    if greedy := [
        sample.rollout_id for sample in samples if np.any(sample.temperatures[sample.loss_mask] <= 0)
    ]:
        raise ValueError(f"samples {greedy} were sampled at temperature 0; sample training data above 0")


def micro_batches(
    samples: Sequence[Sample],
    masks: Sequence[BoolArray],
    max_tokens: int,
    cut: Callable[[tuple[int, ...]], Sequence[int]] | None = None,
) -> tuple[MicroBatch, ...]:
    """Rows that predict exactly the tokens under `masks` (which never cover a first token).

    A sequence ends before its last predicted token; one without predicted tokens is left out.

    cut: from the lengths of a row's sequences to the number of them in each row that it is cut into.

    Raises:
        ValueError: a sample was sampled greedily, so its probabilities have no temperature.
    """
    positions = [np.flatnonzero(mask) for mask in masks]
    chosen = [index for index, at in enumerate(positions) if len(at)]
    check_sampled(samples[index] for index in chosen)
    lengths = [int(positions[index][-1]) for index in chosen]
    rows: Iterable[tuple[int, ...]] = pack(lengths, max_tokens)
    if cut is not None:
        counts = [cut(tuple(lengths[i] for i in row)) for row in rows]
        rows = [part for row, of_row in zip(rows, counts, strict=True) for part in _parts(row, of_row)]
    return tuple(_row(samples, positions, tuple(chosen[i] for i in row)) for row in rows)


def _parts(row: tuple[int, ...], counts: Sequence[int]) -> Iterable[tuple[int, ...]]:
    ends = np.cumsum(counts).tolist()
    return (row[end - count : end] for count, end in zip(counts, ends, strict=True))


def _row(samples: Sequence[Sample], positions: Sequence[Int64Array], members: tuple[int, ...]) -> MicroBatch:
    at = [positions[member] for member in members]
    lengths = [int(positions_[-1]) for positions_ in at]
    counts = [len(positions_) for positions_ in at]
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = [samples[member].token_ids for member in members]
    return MicroBatch(
        members=members,
        positions=tuple(at),
        lengths=tuple(lengths),
        input_ids_T=np.concatenate([t[:n] for t, n in zip(tokens, lengths, strict=True)], dtype=np.int64),
        position_ids_T=np.arange(sum(lengths)) - np.repeat(starts, lengths),
        predictor_N=np.concatenate(at) - 1 + np.repeat(starts, counts),
        targets_N=np.concatenate([t[p] for t, p in zip(tokens, at, strict=True)], dtype=np.int64),
        temperature_N=np.concatenate(
            [samples[member].temperatures[p] for member, p in zip(members, at, strict=True)], dtype=np.float64
        ),
        kept_N=_kept_ids([samples[member] for member in members], at),
        routed_T=_experts([samples[member] for member in members], lengths, ROUTED_EXPERTS),
        replayed_T=_experts([samples[member] for member in members], lengths, REPLAYED_EXPERTS),
    )


def _experts(samples: Sequence[Sample], lengths: Sequence[int], name: str) -> RoutedArray | None:
    """Those of the first tokens of each sample, one after the other."""
    parts: list[tuple[int, dict[str, Extra]]] = []
    for sample, length in zip(samples, lengths, strict=True):
        extra = sample.extras.get(name)
        parts.append((length, {} if extra is None else {name: extra.take(range(length))}))
    joined = joined_extras(parts).get(name)
    return None if joined is None else joined.values.astype(np.int16, copy=False)


def _kept_ids(samples: Sequence[Sample], positions: Sequence[Int64Array]) -> Extra | None:
    parts: list[tuple[int, dict[str, Extra]]] = []
    for sample, at in zip(samples, positions, strict=True):
        kept = sample.extras.get(KEPT_IDS)
        parts.append((len(at), {} if kept is None else {KEPT_IDS: kept.take(at)}))
    joined = joined_extras(parts).get(KEPT_IDS)
    return joined if joined is not None and len(joined.values) else None
