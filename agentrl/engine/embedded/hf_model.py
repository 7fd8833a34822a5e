"""A family that the decoder has no table for: transformers' own model, behind the same seam.

Each slot has a cache of transformers. Slots with equally many tokens go through the model together, as the
samples of one prompt do at first: exact for every family, and several times slower than the decoder.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from agentrl.engine.embedded.architecture import context_of
from agentrl.engine.embedded.decoder import Batch, Weights
from agentrl.types.seams import Bucket
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import named_weights, views
from agentrl.weights.hf.source import long_ropes
from agentrl.weights.quiet import quiet_transformers


@dataclass(frozen=True, slots=True, eq=False)
class ModelParameters:
    """All weights, in memory of their own: training the source model does not change them."""

    model: PreTrainedModel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """The tokens of the vocabulary (count)."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def max_position_embeddings(self) -> int:
        """The most tokens of a sequence."""
        return context_of(self.model.config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of the model, by the name that its family saves it under."""
        return {name: tuple(tensor.shape) for name, tensor in named_weights(self.model)}


@dataclass(slots=True)
class _Slot:
    """What is cached of a slot: the tokens, and transformers' cache of them; None = nothing."""

    ids: list[int] = field(default_factory=list)
    cache: Cache | None = None


class ModelDecoder:
    """The cache of every slot, and the forward pass that extends it; see `Decoder`."""

    def __init__(self, num_slots: int, context_len: int) -> None:
        self.scratch = context_len
        self._num_slots = num_slots
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """The size of what is cached (bytes)."""
        return sum(tensor.nbytes for slot in self._slots for tensor in _tensors(slot.cache))

    def allocate(self) -> None:
        """Have an empty cache."""
        self._slots = [_Slot() for _ in range(self._num_slots)]

    def free(self) -> None:
        """Drop the cache; until `allocate` the decoder is unusable."""
        self._slots = []

    def exchange(self, a: int, b: int, length: int) -> None:
        """Swap two slots."""
        del length
        self._slots[a], self._slots[b] = self._slots[b], self._slots[a]

    def forward(self, parameters: Weights, batch: Batch) -> Tensor:
        """Cache the batch's tokens; returns float32 logits [P, vocabulary] of the picked ones."""
        assert isinstance(parameters, ModelParameters), "an engine's decoder is that of its weights"
        logits = torch.zeros(batch.tokens.size, parameters.vocab_size)
        for group in self._groups(batch):
            keep = max(work.end - work.first for work in group)
            extended_RKV = _extended(parameters.model, group, keep)
            for work, row_KV in zip(group, extended_RKV, strict=True):
                logits[work.first : work.end] = row_KV[keep - (work.end - work.first) :]
        return logits[torch.from_numpy(batch.pick)]

    def _groups(self, batch: Batch) -> Iterator[Sequence[_Work]]:
        """Rows that go through the model together: slots with equally many tokens, before and new ones."""
        if batch.gathers:
            # A slot may have several rows, one after the other; and sums depend on what is computed together.
            yield from ([work] for work in self._works(batch))
            return
        alike: dict[tuple[int, int, bool], list[_Work]] = {}
        for work in self._works(batch):
            key = (len(work.slot.ids), len(work.ids), work.slot.cache is None)
            alike.setdefault(key, []).append(work)
        yield from alike.values()

    def _works(self, batch: Batch) -> Iterator[_Work]:
        """What is computed of each row, with the cache of its slot cut to what is before."""
        width = batch.tokens.shape[1]
        for row, slot in enumerate(batch.slots.tolist()):
            ids = batch.tokens[row, batch.columns[row] < self.scratch].tolist()
            picked = batch.pick[batch.pick // width == row]
            # A step has a token for the idle slots among the active ones, and asks for nothing of theirs.
            if not ids or (width == 1 and not len(picked)):
                continue
            end = row * width + len(ids)
            _cut(self._slots[slot], int(batch.columns[row, 0]))
            yield _Work(self._slots[slot], ids, int(picked[0]) if len(picked) else end - 1, end)


class _Work(NamedTuple):
    """New tokens of a slot. first, end: those of them whose logits may be asked for, in the flat batch."""

    slot: _Slot
    ids: list[int]
    first: int
    end: int


def _cut(slot: _Slot, length: int) -> None:
    """Have at most so many tokens of a slot cached."""
    surplus = len(slot.ids) - length
    assert surplus >= 0, "a column is computed after those before it"
    if not surplus:
        return
    slot.ids = slot.ids[:length]
    layers = [] if slot.cache is None else slot.cache.layers
    if slot.cache is not None and length and all(type(layer) is DynamicLayer for layer in layers):
        slot.cache.crop(-surplus)
    else:
        # A window or a recurrence has forgotten what was before: it is computed again.
        slot.cache = None


def _extended(model: PreTrainedModel, group: Sequence[_Work], keep: int) -> Tensor:
    """Cache tokens of slots with equally many, each; returns the logits of the last `keep`, [R, keep, V]."""
    slots = [work.slot for work in group]
    before, ids = len(slots[0].ids), torch.tensor([work.ids for work in group])
    if slots[0].cache is None or _is_long(model, before) != _is_long(model, before + ids.shape[1]):
        ids = torch.tensor([[*work.slot.ids, *work.ids] for work in group])
        cache = None
    else:
        cache = joined([slot.cache for slot in slots if slot.cache is not None])
    # Not in every version of transformers does a recurrence go on with several tokens.
    size = 1 if cache is not None and _has_recurrence(cache) else ids.shape[1]
    logits: list[Tensor] = []
    for part in ids.split(size, 1):
        part_logits, cache = _computed(model, part, cache, min(keep, size))
        logits.append(part_logits)
    for row, work in enumerate(group):
        work.slot.ids = [*work.slot.ids, *work.ids]
        work.slot.cache = cache if len(group) == 1 or cache is None else one_of(cache, row)
    return torch.cat(logits, 1)[:, -keep:]


def _computed(
    model: PreTrainedModel, ids_RS: Tensor, cache: Cache | None, keep: int
) -> tuple[Tensor, Cache | None]:
    """The float32 logits of the last `keep` tokens of each row, [R, keep, V], and the cache of all."""
    takes = _arguments_of(type(model).forward)
    name = "cache_params" if "cache_params" in takes else "past_key_values"
    given: dict[str, Cache | int | None] = {name: cache}
    if "logits_to_keep" in takes:
        given["logits_to_keep"] = keep
    output = model(input_ids=ids_RS, use_cache=True, **given)
    logits_RKV: Tensor = output.logits[:, -keep:]
    return logits_RKV.float(), getattr(output, name)


def joined(caches: Sequence[Cache]) -> Cache:
    """The caches of several sequences of one length as that of a batch; the first dimension is the row."""
    if len(caches) == 1:
        return caches[0]
    return _changed(caches, torch.cat)


def one_of(cache: Cache, row: int) -> Cache:
    """The cache of one row of a batch, in memory of its own."""
    return _changed([cache], lambda tensors: tensors[0][row : row + 1].clone())


def _changed(caches: Sequence[Cache], change: Callable[[list[Tensor]], Tensor]) -> Cache:
    """A cache with the tensors that `change` makes of those of others; all else is as in the first."""

    def made(values: list[object]) -> object:
        first = values[0]
        # Counters of tokens are the same in all.
        if isinstance(first, Tensor) and first.ndim:
            return change([value for value in values if isinstance(value, Tensor)])
        if isinstance(first, dict):
            each = [value for value in values if isinstance(value, dict)]
            return {key: made([value[key] for value in each]) for key in first}
        return first

    whole = copy(caches[0])
    whole.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = copy(layers[0])
        for name in vars(layer):
            setattr(layer, name, made([getattr(each, name) for each in layers]))
        whole.layers.append(layer)
    return whole


@lru_cache(maxsize=8)
def _arguments_of(forward: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def _has_recurrence(cache: Cache) -> bool:
    return not all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def _is_long(model: PreTrainedModel, length: int) -> bool:
    """Whether a sequence of this length has other rotary positions than a shorter one."""
    return any(length > most for most in long_ropes(model.config))


def _tensors(cache: Cache | None) -> list[Tensor]:
    layers = [] if cache is None else cache.layers
    return [value for value in tree_leaves([vars(layer) for layer in layers]) if isinstance(value, Tensor)]


class StagedModel:
    """Stages all tensors of a version, then builds the model of them.

    model: one of the same configuration. thread: copies and builds. install: serves the new weights.
    """

    def __init__(
        self, model: PreTrainedModel, thread: Executor, install: Callable[[Weights], Awaitable[None]]
    ) -> None:
        self._like, self._thread, self._install = model, thread, install
        self._sent: dict[str, Tensor] = {}
        self._built: ModelParameters | None = None

    async def add(self, bucket: Bucket) -> None:
        """Copy tensors that have not been staged before.

        Raises:
            ValueError: the bytes do not add up to the tensors.
        """
        # The thread takes the bucket out of the list: no reference to its memory outlives the call.
        await asyncio.wrap_future(self._thread.submit(partial(self._add, [bucket])))

    def _add(self, buckets: list[Bucket]) -> None:
        self._sent |= {name: tensor.clone() for name, tensor in views(buckets.pop())}

    async def checksum(self) -> int:
        """The checksum of the model's tensors, read back; one that was cast counts as it was sent."""
        return await asyncio.wrap_future(self._thread.submit(self._build))

    def _build(self) -> int:
        dtype = self._like.dtype
        cast = {name: tensor.to(dtype) for name, tensor in self._sent.items()}
        with quiet_transformers():
            model = type(self._like).from_pretrained(
                None, config=deepcopy(self._like.config), state_dict=cast, dtype=dtype
            )
        self._built = ModelParameters(model.eval())
        loaded = named_weights(model)
        return checksum(
            (name, tensor if self._sent[name].dtype == dtype else self._sent[name]) for name, tensor in loaded
        )

    async def install(self) -> None:
        """Swap the model, between two tokens of every request."""
        assert self._built is not None, "a commit compares the checksum first"
        await self._install(self._built)
