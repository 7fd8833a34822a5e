"""How one parameter of Megatron is made of tensors of a Hugging Face checkpoint, and cut over tensor ranks.

    checkpoint's tensors  --join-->  whole parameter  --cut-->  one shard a rank
    checkpoint's tensors  <------------------unshard---------   one shard a rank

All of it moves values and rounds none, so there and back gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Dims(NamedTuple):
    """What the rules need to know of a model. padded_vocab: rows of the embedding, the same on every rank."""

    query_groups: int
    heads_per_group: int
    kv_channels: int
    padded_vocab: int


class Run(NamedTuple):
    """Which of the equal runs that a dimension is cut into: of tensor rank `number` of `ranks`."""

    number: int
    ranks: int

    def of(self, whole: Tensor, along: int = 0) -> Tensor:
        """A view of it."""
        return _equal(whole, self.ranks, along)[self.number]


class Rule(Protocol):
    """One parameter of Megatron. hf: the names of the tensors that it is made of."""

    @property
    def megatron(self) -> str:
        """Its name in Megatron, below the layer."""

    @property
    def hf(self) -> tuple[str, ...]:
        """Their names in the checkpoint, below the layer."""

    @property
    def is_cut(self) -> bool:
        """Whether tensor ranks have different shards; else each has all of it."""

    def join(self, parts: Sequence[Tensor], dims: Dims, /) -> Tensor:
        """The whole parameter of the tensors `hf`."""

    def cut(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """One shard for each tensor rank."""

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims, /) -> None:
        """Write a shard where it belongs in the tensors `hf`."""


@dataclass(frozen=True, slots=True)
class Same:
    """One tensor as it is. along: the dimension it is cut in; None = every rank has all of it."""

    megatron: str
    name: str
    along: int | None = None

    @property
    def hf(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    @property
    def is_cut(self) -> bool:
        """Where there is a dimension to cut it in."""
        return self.along is not None

    def join(self, parts: Sequence[Tensor], _dims: Dims, /) -> Tensor:
        """The tensor."""
        return parts[0]

    def cut(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Equal runs of rows (0) or columns (1)."""
        return [whole] * ranks if self.along is None else _equal(whole, ranks, self.along)

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], _dims: Dims, /) -> None:
        """Its run of the tensor, or all of it."""
        (tensor,) = tensors
        (tensor if self.along is None else run.of(tensor, self.along)).copy_(shard)


@dataclass(frozen=True, slots=True)
class Vocabulary(Same):
    """An embedding, or the layer over the vocabulary: rows of zeros are added until all ranks have
    as many."""

    along: int | None = 0

    def join(self, parts: Sequence[Tensor], dims: Dims, /) -> Tensor:
        """[padded_vocab, hidden]."""
        (rows,) = parts
        missing = dims.padded_vocab - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], _dims: Dims, /) -> None:
        """Its rows, without those that were added."""
        place = tensors[0][run.number * len(shard) :][: len(shard)]
        place.copy_(shard[: len(place)])


@dataclass(frozen=True, slots=True)
class Qkv:
    """Queries, keys and values of an attention, group by group: all queries of a group, its key, its value.

    name: with {} where the checkpoint has q, k and v.
    """

    megatron: str
    name: str

    @property
    def hf(self) -> tuple[str, ...]:
        """Queries, keys, values."""
        return tuple(self.name.format(letter) for letter in "qkv")

    @property
    def is_cut(self) -> bool:
        """Always."""
        return True

    def join(self, parts: Sequence[Tensor], dims: Dims, /) -> Tensor:
        """[groups x (heads per group + 2) x channels, ...]."""
        rest = parts[0].shape[1:]
        grouped = [part.reshape(dims.query_groups, -1, *rest) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, *rest)

    def cut(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Equal runs of rows: whole groups, or parts of one where there are more ranks than groups."""
        return _equal(whole, ranks, 0)

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims, /) -> None:
        """Queries, keys and values of its groups, of which ranks have whole ones."""
        pieces = _pieces(shard, dims.query_groups // run.ranks, dims)
        for tensor, piece in zip(tensors, pieces, strict=True):
            run.of(tensor.unflatten(0, (dims.query_groups, -1))).copy_(piece)


@dataclass(frozen=True, slots=True)
class GateUp:
    """The two inner layers of a gated feed-forward block, in one: each rank has its run of both.

    names: one of the gate and one of the other; or one name, where the checkpoint has both in one tensor.
    """

    megatron: str
    names: tuple[str, ...]

    @property
    def hf(self) -> tuple[str, ...]:
        """The names."""
        return self.names

    @property
    def is_cut(self) -> bool:
        """Always."""
        return True

    def join(self, parts: Sequence[Tensor], _dims: Dims, /) -> Tensor:
        """The gate's rows, then the other's."""
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def cut(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """The rank's run of the gate, then its run of the other."""
        gate, up = (_equal(half, ranks, 0) for half in whole.chunk(2))
        return [torch.cat(pair) for pair in zip(gate, up, strict=True)]

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], _dims: Dims, /) -> None:
        """Its run of the gate and its run of the other."""
        halves = tensors if len(tensors) > 1 else tensors[0].chunk(2)
        for half, piece in zip(halves, shard.chunk(2), strict=True):
            run.of(half).copy_(piece)


def _pieces(whole: Tensor, groups: int, dims: Dims) -> tuple[Tensor, ...]:
    """Queries, keys and values: [groups, rows of one, ...]."""
    sizes = [dims.heads_per_group * dims.kv_channels, dims.kv_channels, dims.kv_channels]
    return torch.split(whole.unflatten(0, (groups, -1)), sizes, dim=1)


def _equal(whole: Tensor, ranks: int, along: int) -> list[Tensor]:
    size = whole.shape[along]
    if size % ranks:
        raise ValueError(f"{size} rows or columns cannot be shared evenly by {ranks} tensor ranks")
    return list(whole.chunk(ranks, along))
