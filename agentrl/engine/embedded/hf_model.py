"""A family that the decoder has no table for: transformers' own model, behind the same seam.

Each slot has a cache of transformers, and goes through the model by itself: exact for every family, and
several times slower than the decoder.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial

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
        width, pick = batch.tokens.shape[1], torch.from_numpy(batch.pick)
        logits = torch.zeros(batch.tokens.size, parameters.vocab_size)
        for row, slot in enumerate(batch.slots.tolist()):
            ids = batch.tokens[row, batch.columns[row] < self.scratch].tolist()
            own = batch.pick[batch.pick // width == row]
            # A step has a token for the idle slots among the active ones, and asks for nothing of theirs.
            if not ids or (width == 1 and not len(own)):
                continue
            end = row * width + len(ids)
            first = int(own[0]) if len(own) else end - 1
            slot_ = self._slots[slot]
            _cut(slot_, int(batch.columns[row, 0]))
            logits[first:end] = _extended(parameters.model, slot_, ids, end - first)
        return logits[pick]


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


def _extended(model: PreTrainedModel, slot: _Slot, ids: list[int], keep: int) -> Tensor:
    """Cache tokens; returns the logits of the last `keep` of them, [keep, vocabulary]."""
    length = len(slot.ids) + len(ids)
    if slot.cache is None or _is_long(model, len(slot.ids)) != _is_long(model, length):
        ids, slot.ids, slot.cache = [*slot.ids, *ids], [], None
    logits: list[Tensor] = []
    while ids:
        # Not in every version of transformers does a recurrence go on with several tokens.
        size = 1 if slot.cache is not None and _has_recurrence(slot.cache) else len(ids)
        logits.append(_computed(model, slot, ids[:size], min(keep, size)))
        ids = ids[size:]
    return torch.cat(logits)[-keep:]


def _computed(model: PreTrainedModel, slot: _Slot, ids: list[int], keep: int) -> Tensor:
    """The logits of the last `keep` of some tokens, which are cached."""
    takes = _arguments_of(type(model).forward)
    name = "cache_params" if "cache_params" in takes else "past_key_values"
    given: dict[str, Cache | int | None] = {name: slot.cache}
    if "logits_to_keep" in takes:
        given["logits_to_keep"] = keep
    output = model(input_ids=torch.tensor([ids]), use_cache=True, **given)
    slot.cache = getattr(output, name)
    slot.ids += ids
    logits_KV: Tensor = output.logits[0, -keep:]
    return logits_KV.float()


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
