"""One parameter of Megatron: joined from tensors of a Hugging Face checkpoint, and cut over tensor ranks.

    checkpoint's tensors  --join-->  unsharded parameter  --cut-->  one shard a rank
    checkpoint's tensors  <------------------unshard-------------   one shard a rank

All three move values and round none, so the round trip gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Dims(NamedTuple):
    """The sizes of a model that the rules depend on. padded_vocab: rows of the embedding, over all ranks."""

    query_groups: int
    heads_per_group: int
    kv_channels: int
    padded_vocab: int


class Run(NamedTuple):
    """One of the equal runs that a dimension is cut into: that of tensor rank `number` of `ranks`."""

    number: int
    ranks: int

    def of(self, tensor: Tensor, along: int = 0) -> Tensor:
        """The view of this run."""
        return _equal(tensor, self.ranks, along)[self.number]


class Rule(Protocol):
    """One parameter of Megatron. hf: the names of the tensors that it is joined from."""

    @property
    def megatron(self) -> str:
        """Its name in Megatron, below the layer."""

    @property
    def hf(self) -> tuple[str, ...]:
        """Their names in the checkpoint, below the layer."""

    @property
    def is_cut(self) -> bool:
        """Whether tensor ranks have different shards; else each has all of it."""

    @property
    def learns(self) -> bool:
        """Whether the optimizer steps it; what does not learn stays in fp32."""

    def join(self, parts: Sequence[Tensor], dims: Dims, /) -> Tensor:
        """The unsharded parameter, from the tensors `hf`."""

    def cut(self, unsharded: Tensor, ranks: int) -> list[Tensor]:
        """One shard for each tensor rank."""

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims, /) -> None:
        """Write a shard to its positions in the tensors `hf`."""


@dataclass(frozen=True, slots=True)
class Same:
    """One tensor as it is. along: the dimension it is cut in; None = every rank has all of it."""

    megatron: str
    name: str
    along: int | None = None
    learns: bool = True

    @property
    def hf(self) -> tuple[str, ...]:
        """The one name."""
        return (self.name,)

    @property
    def is_cut(self) -> bool:
        """Whether `along` is set."""
        return self.along is not None

    def join(self, parts: Sequence[Tensor], _dims: Dims, /) -> Tensor:
        """The tensor."""
        return parts[0]

    def cut(self, unsharded: Tensor, ranks: int) -> list[Tensor]:
        """Equal runs of rows (0) or columns (1)."""
        return [unsharded] * ranks if self.along is None else _equal(unsharded, ranks, self.along)

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], _dims: Dims, /) -> None:
        """Its run of the tensor, or all of it."""
        (tensor,) = tensors
        (tensor if self.along is None else run.of(tensor, self.along)).copy_(shard)


@dataclass(frozen=True, slots=True)
class Vocabulary(Same):
    """An embedding, or the layer over the vocabulary: rows of zeros are added until all ranks have
    the same number."""

    along: int | None = 0

    def join(self, parts: Sequence[Tensor], dims: Dims, /) -> Tensor:
        """[padded_vocab, hidden]."""
        (rows,) = parts
        missing = dims.padded_vocab - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], _dims: Dims, /) -> None:
        """Its rows, without the added ones."""
        target = tensors[0][run.number * len(shard) :][: len(shard)]
        target.copy_(shard[: len(target)])


@dataclass(frozen=True, slots=True)
class Swapped(Same):
    """A matrix whose left half of columns is the right one in the checkpoint; every rank has all of it."""

    def join(self, parts: Sequence[Tensor], _dims: Dims, /) -> Tensor:
        """The matrix with its halves in the other order."""
        left, right = parts[0].chunk(2, 1)
        return torch.cat([right, left], 1)

    def unshard(self, shard: Tensor, _run: Run, tensors: Sequence[Tensor], dims: Dims, /) -> None:
        """Back in the checkpoint's order."""
        tensors[0].copy_(self.join([shard], dims))


@dataclass(frozen=True, slots=True)
class Qkv:
    """Queries, keys and values of an attention, group by group: all queries of a group, its key, its value.

    name: with {} where the checkpoint has q, k and v.
    """

    megatron: str
    name: str
    learns: bool = True

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

    def cut(self, unsharded: Tensor, ranks: int) -> list[Tensor]:
        """Equal runs of rows: whole groups, or parts of one where there are more ranks than groups."""
        return _equal(unsharded, ranks, 0)

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims, /) -> None:
        """Queries, keys and values of its groups; each rank has whole groups."""
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
    learns: bool = True

    @property
    def hf(self) -> tuple[str, ...]:
        """The names."""
        return self.names

    @property
    def is_cut(self) -> bool:
        """Always."""
        return True

    def join(self, parts: Sequence[Tensor], _dims: Dims, /) -> Tensor:
        """The gate's rows, then the other layer's."""
        return torch.cat(list(parts)) if len(parts) > 1 else parts[0]

    def cut(self, unsharded: Tensor, ranks: int) -> list[Tensor]:
        """The rank's run of the gate, then its run of the other layer."""
        gate, up = (_equal(half, ranks, 0) for half in unsharded.chunk(2))
        return [torch.cat(pair) for pair in zip(gate, up, strict=True)]

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], _dims: Dims, /) -> None:
        """Its run of the gate and its run of the other layer."""
        halves = tensors if len(tensors) > 1 else tensors[0].chunk(2)
        for half, piece in zip(halves, shard.chunk(2), strict=True):
            run.of(half).copy_(piece)


@dataclass(frozen=True, slots=True)
class Stacked:
    """A parameter of one expert, in tensors with those of all experts of a layer, one behind the other.

    inner: its rule. Matrices lie transposed there, and of a `GateUp` rows of the gate alternate with rows of
    the other layer (gpt-oss). expert: its number.
    """

    inner: Rule
    expert: int

    @property
    def megatron(self) -> str:
        """That of the inner rule."""
        return self.inner.megatron

    @property
    def hf(self) -> tuple[str, ...]:
        """The tensors of all experts."""
        return self.inner.hf

    @property
    def is_cut(self) -> bool:
        """That of the inner rule."""
        return self.inner.is_cut

    @property
    def learns(self) -> bool:
        """That of the inner rule."""
        return self.inner.learns

    def join(self, parts: Sequence[Tensor], dims: Dims, /) -> Tensor:
        """The expert's own."""
        return self.inner.join(self._own(parts), dims)

    def cut(self, unsharded: Tensor, ranks: int) -> list[Tensor]:
        """As the inner rule."""
        return self.inner.cut(unsharded, ranks)

    def unshard(self, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims, /) -> None:
        """To the expert's place."""
        self.inner.unshard(shard, run, self._own(tensors), dims)

    def _own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the expert's part, as the inner rule takes them."""
        (tensor,) = (tensor[self.expert] for tensor in tensors)
        own = tensor.T if tensor.ndim == 2 else tensor
        return [own[::2], own[1::2]] if isinstance(self.inner, GateUp) else [own]


def _pieces(qkv: Tensor, groups: int, dims: Dims) -> tuple[Tensor, ...]:
    """Queries, keys and values: [groups, rows of a group, ...]."""
    sizes = [dims.heads_per_group * dims.kv_channels, dims.kv_channels, dims.kv_channels]
    return torch.split(qkv.unflatten(0, (groups, -1)), sizes, dim=1)


def _equal(tensor: Tensor, ranks: int, along: int) -> list[Tensor]:
    size = tensor.shape[along]
    if size % ranks:
        raise ValueError(f"{size} rows or columns cannot be shared evenly by {ranks} tensor ranks")
    return list(tensor.chunk(ranks, along))
