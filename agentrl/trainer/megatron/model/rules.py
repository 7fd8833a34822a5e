"""One parameter of Megatron: joined from tensors of a Hugging Face checkpoint, and cut over tensor ranks.

    checkpoint's tensors  --join-->  unsharded parameter  --cut-->  one shard a rank
    checkpoint's tensors  <------------------places--------------   one shard a rank

All three move values and round none, so the round trip gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CHUNK = 64
"""Tokens that a gated delta net computes together; from one chunk to the next it passes on a state."""


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net: its heads, the channels of each, and the taps of its convolution.

    Each key head, which has queries, too, serves as many value heads that lie together.
    """

    key_heads: int
    value_heads: int
    key_channels: int
    value_channels: int
    taps: int

    def rows(self, parts: str) -> list[int]:
        """Of some parts: q, k, v; z, the gate of outputs; b and a, what is written and what is forgotten."""
        keys, values = self.key_heads * self.key_channels, self.value_heads * self.value_channels
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": self.value_heads, "a": self.value_heads}
        return [sizes[part] for part in parts]


class Dims(NamedTuple):
    """The sizes of a model that the rules depend on. padded_vocab: rows of the embedding, over all ranks.

    delta: of its layers of linear attention.
    """

    query_groups: int
    kv_channels: int
    padded_vocab: int
    delta: DeltaSizes | None = None


class ShardPlace(NamedTuple):
    """A view of a tensor of a checkpoint, and the view of a shard that lies there."""

    tensor: Tensor
    piece: Tensor


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

    def places(
        self, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims, /
    ) -> Iterator[ShardPlace]:
        """Where the tensors `hf` have a shard: all its pieces."""


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

    def places(
        self, shard: Tensor, run: Run, tensors: Sequence[Tensor], _dims: Dims, /
    ) -> Iterator[ShardPlace]:
        """Its run of the tensor, or all of it."""
        (tensor,) = tensors
        yield ShardPlace(tensor if self.along is None else run.of(tensor, self.along), shard)


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

    def places(
        self, shard: Tensor, run: Run, tensors: Sequence[Tensor], _dims: Dims, /
    ) -> Iterator[ShardPlace]:
        """Its rows, without the added ones."""
        target = tensors[0][run.number * len(shard) :][: len(shard)]
        yield ShardPlace(target, shard[: len(target)])


@dataclass(frozen=True, slots=True)
class Swapped(Same):
    """A matrix whose left half of columns is the right one in the checkpoint; every rank has all of it."""

    def join(self, parts: Sequence[Tensor], _dims: Dims, /) -> Tensor:
        """The matrix with its halves in the other order."""
        left, right = parts[0].chunk(2, 1)
        return torch.cat([right, left], 1)

    def places(
        self, shard: Tensor, _run: Run, tensors: Sequence[Tensor], _dims: Dims, /
    ) -> Iterator[ShardPlace]:
        """Back in the checkpoint's order."""
        yield from map(ShardPlace, tensors[0].chunk(2, 1), shard.chunk(2, 1)[::-1])


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
        """[groups x (heads per group + 2) x channels, ...]; of queries with gates twice as many."""
        return _grouped(parts, dims.query_groups)

    def cut(self, unsharded: Tensor, ranks: int) -> list[Tensor]:
        """Equal runs of rows: whole groups, or parts of one where there are more ranks than groups."""
        return _equal(unsharded, ranks, 0)

    def places(
        self, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims, /
    ) -> Iterator[ShardPlace]:
        """Queries, keys and values of its groups; each rank has whole groups."""
        return _ungrouped(shard, run, tensors, dims.query_groups)


@dataclass(frozen=True, slots=True)
class KeyHeads:
    """Parts of a gated delta net in one parameter, key head by key head: of each its rows of every part.

    tensors: the names, each with the parts that the tensor has, see `DeltaSizes.rows`. by_head: its rows lie
    so in the checkpoint, too; else it has one part after the other.
    """

    megatron: str
    tensors: tuple[tuple[str, str], ...]
    by_head: bool = False
    learns: bool = True

    @property
    def hf(self) -> tuple[str, ...]:
        """The names."""
        return tuple(name for name, _ in self.tensors)

    @property
    def is_cut(self) -> bool:
        """Always."""
        return True

    def join(self, parts: Sequence[Tensor], dims: Dims, /) -> Tensor:
        """[key heads x rows of one, ...]."""
        delta = _delta(dims)
        return _grouped(self._parts(parts, delta), delta.key_heads)

    def cut(self, unsharded: Tensor, ranks: int) -> list[Tensor]:
        """Equal runs of rows: whole heads, where the ranks divide their number."""
        return _equal(unsharded, ranks, 0)

    def places(
        self, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims, /
    ) -> Iterator[ShardPlace]:
        """All parts of its key heads."""
        delta = _delta(dims)
        return _ungrouped(shard, run, self._parts(tensors, delta), delta.key_heads)

    def rows(self, dims: Dims) -> list[int]:
        """Of each tensor (count)."""
        return [sum(_delta(dims).rows(parts)) for _, parts in self.tensors]

    def _parts(self, tensors: Sequence[Tensor], delta: DeltaSizes) -> list[Tensor]:
        """Views, each of which has its rows key head by key head."""
        if self.by_head:
            return list(tensors)
        named = zip(tensors, self.tensors, strict=True)
        return [view for tensor, (_, parts) in named for view in tensor.split(delta.rows(parts))]


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

    def places(
        self, shard: Tensor, run: Run, tensors: Sequence[Tensor], _dims: Dims, /
    ) -> Iterator[ShardPlace]:
        """Its run of the gate and its run of the other layer."""
        halves = tensors if len(tensors) > 1 else tensors[0].chunk(2)
        for half, piece in zip(halves, shard.chunk(2), strict=True):
            yield ShardPlace(run.of(half), piece)


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

    def places(
        self, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims, /
    ) -> Iterator[ShardPlace]:
        """To the expert's place."""
        return self.inner.places(shard, run, self._own(tensors), dims)

    def _own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the expert's part, as the inner rule takes them."""
        (tensor,) = (tensor[self.expert] for tensor in tensors)
        own = tensor.T if tensor.ndim == 2 else tensor
        return [own[::2], own[1::2]] if isinstance(self.inner, GateUp) else [own]


def unshard(rule: Rule, shard: Tensor, run: Run, tensors: Sequence[Tensor], dims: Dims) -> None:
    """Write a shard to its places in the tensors of a rule."""
    for tensor, piece in rule.places(shard, run, tensors, dims):
        tensor.copy_(piece)


def _delta(dims: Dims) -> DeltaSizes:
    assert dims.delta is not None, "only a family of gated delta nets has such parameters"
    return dims.delta


def _grouped(parts: Sequence[Tensor], groups: int) -> Tensor:
    """The rows of all parts, group by group; each part has equally many for every group."""
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], 1).flatten(0, 1)


def _ungrouped(shard: Tensor, run: Run, parts: Sequence[Tensor], groups: int) -> Iterator[ShardPlace]:
    """The rows of the parts that a run of what `_grouped` makes has."""
    views = [part.unflatten(0, (groups, -1)) for part in parts]
    pieces = shard.unflatten(0, (groups // run.ranks, -1)).split([view.shape[1] for view in views], 1)
    for view, piece in zip(views, pieces, strict=True):
        yield ShardPlace(run.of(view), piece)


def _equal(tensor: Tensor, ranks: int, along: int) -> list[Tensor]:
    size = tensor.shape[along]
    if size % ranks:
        raise ValueError(f"{size} rows or columns cannot be shared evenly by {ranks} tensor ranks")
    return list(tensor.chunk(ranks, along))
