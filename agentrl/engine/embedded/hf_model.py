"""A family that the decoder has no table for: transformers' own model, behind the same seam.

Slots with equally many new tokens go through the model together, on a cache that they share as long as they
stay together; rows of unlike lengths are padded at their beginning. Exact for every family, and slower.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from agentrl.engine.embedded.architecture import context_of
from agentrl.engine.embedded.decoder import Batch, Weights
from agentrl.engine.embedded.slots import RoutedSlots
from agentrl.types import RoutedArray
from agentrl.types.seams import Bucket
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import named_weights, views
from agentrl.weights.hf.routing import Routers
from agentrl.weights.hf.source import long_ropes
from agentrl.weights.quiet import quiet_transformers


@dataclass(frozen=True, slots=True, eq=False)
class ModelParameters:
    """All weights, in memory of their own: training the source model does not change them.

    routers: of its layers of experts, where it has some that are known.
    """

    model: PreTrainedModel
    routers: Routers | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "routers", Routers.of(self.model))

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


@dataclass(slots=True, eq=False)
class _Slot:
    """What is cached of a slot: its tokens, and their cache, its own or a row of one that slots share."""

    ids: list[int] = field(default_factory=list)
    own: Cache | None = None
    shared: _Shared | None = None
    row: int = 0

    @property
    def has_cache(self) -> bool:
        """Whether anything is cached."""
        return self.own is not None or self.shared is not None

    @property
    def cache(self) -> Cache | None:
        """The cache that holds its tokens."""
        return self.own if self.shared is None else self.shared.cache

    def leave(self) -> None:
        """Have a cache of its own, or none."""
        if self.shared is not None:
            self.own, self.shared = own_of(self.shared.cache, self.row, len(self.ids)), None

    def cut(self, length: int) -> None:
        """Have at most so many tokens cached."""
        surplus = len(self.ids) - length
        assert surplus >= 0, "a column is computed after those before it"
        if not surplus:
            return
        self.leave()
        self.ids = self.ids[:length]
        if self.own is not None and length and all(type(layer) is DynamicLayer for layer in self.own.layers):
            self.own.crop(-surplus)
        else:
            # A window or a recurrence has forgotten what was before: it is computed again.
            self.own = None


@dataclass(slots=True, eq=False)
class _Shared:
    """A cache of several slots, a row each; rows with fewer tokens are padded at their beginning."""

    cache: Cache
    slots: list[_Slot]

    @classmethod
    def of(cls, slots: Sequence[_Slot]) -> _Shared:
        """That of these slots, in their order; slots that share one with them leave it."""
        shared = slots[0].shared
        if shared is None or any(slot.shared is not shared for slot in slots):
            for slot in slots:
                slot.leave()
            made = cls(joined([slot.own for slot in slots if slot.own is not None]), [*slots])
        elif list(slots) == shared.slots:
            return shared
        else:
            for slot in shared.slots:
                if slot.shared is shared and slot not in slots:
                    slot.leave()
            rows = torch.tensor([slot.row for slot in slots])
            made = cls(_changed([shared.cache], lambda tensors: tensors[0].index_select(0, rows)), [*slots])
        made.adopt()
        return made

    def adopt(self) -> None:
        """Have its slots know it."""
        for row, slot in enumerate(self.slots):
            slot.own, slot.shared, slot.row = None, self, row


class _Work(NamedTuple):
    """New tokens of a slot. first, end: those of them whose logits may be asked for, in the flat batch."""

    number: int
    slot: _Slot
    ids: list[int]
    first: int
    end: int


class ModelDecoder:
    """The cache of every slot, and the forward pass that extends it; see `Decoder`.

    routed: where the experts of its tokens go.
    """

    def __init__(self, num_slots: int, context_len: int, routed: RoutedSlots | None = None) -> None:
        self.scratch = context_len
        self._routed = routed
        self._num_slots = num_slots
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """The size of what is cached (bytes)."""
        caches = {id(slot.cache): slot.cache for slot in self._slots if slot.cache is not None}
        return sum(tensor.nbytes for cache in caches.values() for tensor in _tensors(cache))

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
        if self._routed is not None:
            self._routed.exchange(a, b)

    def forward(self, parameters: Weights, batch: Batch) -> Tensor:
        """Cache the batch's tokens; returns float32 logits [P, vocabulary] of the picked ones."""
        assert isinstance(parameters, ModelParameters), "an engine's decoder is that of its weights"
        logits = torch.zeros(batch.tokens.size, parameters.vocab_size)
        for group in self._groups(parameters.model, batch):
            keep = max(work.end - work.first for work in group)
            with self._recorded(parameters.routers, group):
                extended_RKV = _extended(parameters.model, group, keep)
            for work, row_KV in zip(group, extended_RKV, strict=True):
                logits[work.first : work.end] = row_KV[keep - (work.end - work.first) :]
        return logits[torch.from_numpy(batch.pick)]

    @contextmanager
    def _recorded(self, routers: Routers | None, group: Sequence[_Work]) -> Iterator[None]:
        """Keep the experts of the tokens that a block computes."""
        if routers is None or self._routed is None or not self._routed.is_on:
            yield
            return
        choices = routers.passed = _Choices(len(routers.layers.numbers))
        try:
            yield
        finally:
            routers.passed = None
        for work, rows in zip(group, choices.rows(len(group)), strict=True):
            self._routed.put(work.number, len(work.slot.ids) - len(rows), rows)

    def _groups(self, model: PreTrainedModel, batch: Batch) -> Iterator[Sequence[_Work]]:
        """Rows that go through the model together: those with equally many new tokens."""
        if batch.gathers:
            # A slot may have several rows, one after the other; and sums depend on what is computed together.
            yield from ([work] for work in self._works(batch))
            return
        alike: dict[tuple[int, int], list[_Work]] = {}
        for work in self._works(batch):
            before = len(work.slot.ids)
            if work.slot.cache is not None and _pads(model, work.slot.cache):
                before = _ANY
            alike.setdefault((before, len(work.ids)), []).append(work)
        for group in alike.values():
            # Without a cache a slot begins again.
            yield from filter(None, ([w for w in group if w.slot.has_cache is has] for has in (True, False)))

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
            self._slots[slot].cut(int(batch.columns[row, 0]))
            yield _Work(slot, self._slots[slot], ids, int(picked[0]) if len(picked) else end - 1, end)


class _Choices:
    """What routers choose, pass after pass. A pass has the tokens of its rows, one after the other."""

    def __init__(self, num_layers: int) -> None:
        self._passes: list[list[Tensor]] = [[] for _ in range(num_layers)]

    def chosen(self, layer: int, own_tk: Tensor) -> Tensor:
        """The router's own."""
        self._passes[layer].append(own_tk)
        return own_tk

    def scored(self, layer: int, logits_tE: Tensor, chosen_tk: Tensor, weights_tk: Tensor) -> Tensor:
        """The router's own."""
        del layer, logits_tE, chosen_tk
        return weights_tk

    def rows(self, num_rows: int) -> list[RoutedArray]:
        """Of each row, the experts of its tokens, [tokens, layers, k]."""
        layers = [
            torch.cat([chosen_tk.unflatten(0, (num_rows, -1)) for chosen_tk in passes], 1)
            for passes in self._passes
        ]
        return [*torch.stack(layers, 2).to(torch.int16).numpy()]


_ANY = -1
"""Stands for any number of tokens."""


def _pads(model: PreTrainedModel, cache: Cache) -> bool:
    """Whether sequences of several lengths may share a batch: a mask hides what is before a shorter one."""
    has_mask = "attention_mask" in _arguments_of(type(model).forward)
    return has_mask and not _has_recurrence(cache) and not long_ropes(model.config)


def _extended(model: PreTrainedModel, group: Sequence[_Work], keep: int) -> Tensor:
    """Cache equally many tokens of each slot; returns the logits of the last `keep`, [R, keep, V]."""
    slots = [work.slot for work in group]
    lengths, ids = [len(slot.ids) for slot in slots], torch.tensor([work.ids for work in group])
    if not slots[0].has_cache or _is_long(model, lengths[0]) != _is_long(model, lengths[0] + ids.shape[1]):
        ids = torch.tensor([[*work.slot.ids, *work.ids] for work in group])
        lengths, cache = [0] * len(slots), None
    else:
        cache = _Shared.of(slots).cache
    # Not in every version of transformers does a recurrence go on with several tokens.
    size = 1 if cache is not None and _has_recurrence(cache) else ids.shape[1]
    logits: list[Tensor] = []
    for part in ids.split(size, 1):
        outputs, cache = _computed(model, part, cache, lengths, min(keep, size))
        logits.append(outputs)
        lengths = [length + size for length in lengths]
    for work in group:
        work.slot.ids = [*work.slot.ids, *work.ids]
    assert cache is not None, "tokens were computed"
    _Shared(cache, slots).adopt()
    return torch.cat(logits, 1)[:, -keep:]


def _computed(
    model: PreTrainedModel, ids_RS: Tensor, cache: Cache | None, lengths: Sequence[int], keep: int
) -> tuple[Tensor, Cache | None]:
    """The float32 logits of the last `keep` tokens of each row, [R, keep, V], and the cache of all.

    lengths: of what is cached of each row.
    """
    takes = _arguments_of(type(model).forward)
    name = "cache_params" if "cache_params" in takes else "past_key_values"
    given: dict[str, Cache | Tensor | int | None] = {name: cache}
    if "logits_to_keep" in takes:
        given["logits_to_keep"] = keep
    columns = lengths[0] if cache is None or _has_recurrence(cache) else cache.get_seq_length()
    if any(length < columns for length in lengths):
        starts_R1, new_S = torch.tensor(lengths)[:, None], torch.arange(ids_RS.shape[1])
        is_own_RL = torch.arange(columns + len(new_S)) >= columns - starts_R1
        given["attention_mask"] = is_own_RL.long()
        if "position_ids" in takes:
            given["position_ids"] = starts_R1 + new_S
    output = model(input_ids=ids_RS, use_cache=True, **given)
    logits_RKV: Tensor = output.logits[:, -keep:]
    return logits_RKV.float(), getattr(output, name)


def joined(caches: Sequence[Cache]) -> Cache:
    """The caches of several sequences as that of a batch; shorter ones are padded at their beginning."""
    if len(caches) == 1:
        return caches[0]
    longest = max(caches, key=lambda cache: cache.get_seq_length())
    sizes = [_columns(layer) for layer in longest.layers]
    # Counters of tokens are those of the longest, which comes first.
    padded = [longest, *(_padded(cache, sizes) for cache in caches)]
    return _changed(padded, lambda tensors: torch.cat(tensors[1:]))


def _columns(layer: object) -> int:
    """The columns of keys that a layer of plain attention holds (count); 0 = it is another kind of layer."""
    return layer.keys.shape[-2] if isinstance(layer, DynamicLayer) and layer.keys is not None else 0


def _padded(cache: Cache, sizes: Sequence[int]) -> Cache:
    whole = copy(cache)
    whole.layers = [copy(layer) for layer in cache.layers]
    for layer, size in zip(whole.layers, sizes, strict=True):
        missing = size - _columns(layer)
        if missing and isinstance(layer, DynamicLayer):
            _set(layer, partial(pad, pad=(0, 0, missing, 0)))
    return whole


def own_of(cache: Cache, row: int, length: int) -> Cache:
    """The cache of one row of a batch, without its padding, in memory of its own. length: its tokens."""
    whole = _changed([cache], lambda tensors: tensors[0][row : row + 1])
    for layer in whole.layers:
        size = min(length, _columns(layer))
        if size and isinstance(layer, DynamicLayer):
            _set(layer, partial(Tensor.narrow, dim=2, start=_columns(layer) - size, length=size))
        if type(layer) is DynamicSlidingWindowLayer:
            layer.cumulative_length = length
    return _changed([whole], lambda tensors: tensors[0].clone())


def _set(layer: DynamicLayer, change: Callable[[Tensor], Tensor]) -> None:
    if layer.keys is not None and layer.values is not None:
        layer.keys, layer.values = change(layer.keys), change(layer.values)


def _changed(caches: Sequence[Cache], change: Callable[[list[Tensor]], Tensor]) -> Cache:
    """A cache with the tensors that `change` makes of those of others; all else is as in the first."""

    def made(values: list[object]) -> object:
        first = values[0]
        # Counters of tokens are those of the first.
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


def _tensors(cache: Cache) -> list[Tensor]:
    leaves = tree_leaves([vars(layer) for layer in cache.layers])
    return [value for value in leaves if isinstance(value, Tensor)]


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
