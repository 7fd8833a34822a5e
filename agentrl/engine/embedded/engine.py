"""The embedded engine: requests in, completions out, one decode step at a time in the event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.engine.embedded.architecture import eos_of, read_architecture
from agentrl.engine.embedded.decoder import Decoder, ForwardPass, Weights
from agentrl.engine.embedded.hf_model import ModelDecoder, ModelParameters, StagedModel
from agentrl.engine.embedded.parameters import EMBEDDING, HEAD, Parameters
from agentrl.engine.embedded.scheduler import Scheduler
from agentrl.engine.embedded.sink import EmbeddedSink, Stage, StagedParameters
from agentrl.engine.embedded.slots import NOBODY, Asker, Request, RoutedSlots, Slots
from agentrl.engine.embedded.step import Stepper
from agentrl.errors import EngineError, RequestTooLargeError
from agentrl.runtime.collector import freed_bytes
from agentrl.types import Completion, ExpertLayers, FloatArray, IntArray
from agentrl.types.seams import MemoryTag, Sampling
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.source import long_ropes

Decode = Callable[[Sequence[int]], str]

DEFAULT_CONTEXT = 512
"""Tokens of a slot, where nothing else is configured."""


class EngineMemory:
    """The weights and the cache of the engine, which can be released for a while.

    No step may be made while any of it `is_missing`; the clocks of all requests stand then.
    """

    def __init__(self, slots: Slots, decoder: ForwardPass, stepper: Stepper, scheduler: Scheduler) -> None:
        self._slots, self._decoder = slots, decoder
        self._stepper, self._scheduler = stepper, scheduler
        self._released: set[MemoryTag] = set()

    @property
    def is_missing(self) -> bool:
        """Whether weights or cache are released, so that all requests are held."""
        return bool(self._released) or self._stepper.parameters is None

    @property
    def cache_bytes(self) -> int:
        """The size of the key-value cache, from max_slots x max_context_len (bytes); 0 = released."""
        return self._decoder.num_bytes

    def release(self, tags: Collection[MemoryTag]) -> int:
        """Free weights, cache or both. Returns what the system got back (bytes)."""
        self._released |= set(tags)
        self._scheduler.waits.leave()
        return freed_bytes(self._free)

    def resume(self, tags: Collection[MemoryTag]) -> None:
        """Allocate what was released.

        Raises:
            EngineError: the cache is asked for, and the weights that were released have not been sent again.
        """
        resumed = self._released & set(tags)
        if "kv_cache" in resumed:
            if self._stepper.parameters is None:
                raise EngineError("the engine's weights were released; send some, then resume its kv_cache.")
            self._decoder.allocate()
        self._released -= resumed
        self.go_on()

    def install(self, parameters: Weights, version: int) -> None:
        """Serve these weights from the next token on. Caches of older ones are dropped."""
        self._stepper.parameters = parameters
        self._stepper.version = version
        self.drop_caches()
        self.go_on()

    def rename(self, version: int) -> None:
        """Set the version of the current weights; every later token carries it."""
        self._stepper.version = version

    def drop_caches(self) -> None:
        """Drop all cached keys and values; running requests compute theirs again."""
        self._slots.drop_caches()

    def go_on(self) -> None:
        """Have the requests go on, unless something is missing."""
        if not self.is_missing:
            self._scheduler.waits.come_back()
            self._scheduler.go_on()

    def close(self) -> None:
        """Free the cache."""
        self._decoder.free()

    def _free(self) -> None:
        if "weights" in self._released:
            self._stepper.parameters = None
        if "kv_cache" in self._released:
            self.drop_caches()
            self._decoder.free()


class EmbeddedEngine:
    """Continuous batching over the weights of a causal language model, on the CPU.

    A session keeps its slot, and the keys and values in it, between its requests: the next request
    computes only the tokens after the cached ones. When requests wait, slots of idle sessions are evicted,
    least recently used first; their tokens are then computed again.

    max_slots: requests decoded at once. max_context_len: tokens of a slot, prompt and completion.
    vocab_size: tokens of the vocabulary. scheduler: the requests. memory: weights and cache. expert_layers:
    see `Sampling.return_routed_experts`.
    """

    def __init__(
        self,
        parameters: Parameters | ModelParameters,
        *,
        max_slots: int,
        max_context_len: int | None,
        decode: Decode | None,
        eos_token_ids: Sequence[int],
        deterministic: bool = False,
    ) -> None:
        model_limit = parameters.max_position_embeddings
        self.max_context_len = min(max_context_len or DEFAULT_CONTEXT, model_limit)
        self.max_slots, self.vocab_size = max_slots, parameters.vocab_size
        self.expert_layers = _expert_layers_of(parameters)
        self._slots = _slots_of(max_slots, self.max_context_len, self.expert_layers)
        decoder = _decoder_of(parameters, self._slots, max_slots, self.max_context_len)
        self._stepper = Stepper(self._slots, decoder, parameters, decode, deterministic=deterministic)
        self._intake = _Intake(self, decode is not None, tuple(eos_token_ids))
        self.scheduler = Scheduler(self._slots, self._stepper, lambda: self._paused or self.memory.is_missing)
        self.watched = self.scheduler.watched
        self.memory = EngineMemory(self._slots, decoder, self._stepper, self.scheduler)
        self._closed = self._paused = False
        shapes = parameters.shapes()
        # A checkpoint may carry tied embeddings under both names.
        tied = {HEAD: shapes[EMBEDDING]} if isinstance(parameters, Parameters) else {}
        self._sink = EmbeddedSink(
            *(shapes, tied, _stage_of(parameters), self.memory.install), lambda: self.scheduler.standstill_s
        )

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        *,
        max_slots: int = 256,
        max_context_len: int | None = None,
        decode: Decode | None = None,
        eos_token_ids: Sequence[int] | None = None,
        deterministic: bool = False,
    ) -> EmbeddedEngine:
        """Serve a copy of the model's weights, as version 0, in their dtype.

        Args:
            model: a causal language model. The decoder has a table of Llama, Qwen2 and Qwen3; others are
                decoded by transformers' own code, which is exact and slower.
            max_slots: requests decoded at once.
            max_context_len: tokens a slot holds, prompt and completion; default 512, at most the
                model's max_position_embeddings.
            decode: token ids to text; needed for stop strings only.
            eos_token_ids: tokens that always end a completion; default: the model's own.
            deterministic: the tokens and logprobs of a request, bit for bit, are a function of weights,
                prompt and seed, whatever else runs; slower.

        Raises:
            ModelLoadError: no sequence has probabilities of its own (`long_ropes`).
        """
        return cls(
            _parameters_of(model, copies=True),
            max_slots=max_slots,
            max_context_len=max_context_len,
            decode=decode,
            eos_token_ids=eos_of(model) if eos_token_ids is None else eos_token_ids,
            deterministic=deterministic,
        )

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        max_slots: int = 256,
        max_context_len: int | None = None,
        decode: Decode | None = None,
        dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
    ) -> EmbeddedEngine:
        """Serve the model in a Hugging Face directory, as version 0; arguments as in `from_model`.

        Raises:
            ModelLoadError: the directory is missing or broken; or see `from_model`.
        """
        model = open_directory(directory, dtype)
        return cls(
            _parameters_of(model, copies=False),
            max_slots=max_slots,
            max_context_len=max_context_len,
            decode=decode,
            eos_token_ids=eos_of(model),
            deterministic=deterministic,
        )

    @property
    def version(self) -> int:
        """The version of the weights that serve now."""
        return self._stepper.version

    @property
    def sink(self) -> EmbeddedSink:
        """The sink of new weights. A commit drops every cache; running requests use the new weights."""
        return self._sink

    @property
    def counts(self) -> Mapping[str, int]:
        """Empty: no request of this engine is retried or lost."""
        return {}

    @property
    def num_requests(self) -> int:
        """The number of requests that run or wait."""
        return len(self.scheduler.pending())

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, asker: Asker = NOBODY
    ) -> Completion:
        """Sample a continuation of the full prefix `prompt_ids`; cancelling frees the slot.

        asker: whose request it is.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens exceed max_context_len.
            EngineError: the engine is closed, the request is invalid, the session is busy, or a step failed.
        """
        self._check_takes(session)
        return await self.scheduler.answer(self._intake.sampled(prompt_ids, sampling, session), asker)

    async def score(
        self, token_ids: Sequence[int], start: int, *, session: str, asker: Asker = NOBODY
    ) -> FloatArray | None:
        """The logprobs of `token_ids[start + 1:]`, each given all tokens before it (nats, temperature 1).

        The session keeps the keys and values, also for `generate`. asker: as in `generate`.

        Returns:
            float32 [len(token_ids) - start - 1], or empty; None = the request was ended by an abort.

        Raises:
            RequestTooLargeError: the tokens exceed max_context_len.
            EngineError: as in `generate`.
        """
        self._check_takes(session)
        request = self._intake.scored(token_ids, start, session)
        await self.scheduler.answer(request, asker)
        return request.scores

    def _check_takes(self, session: str) -> None:
        if self._closed:
            raise EngineError("the engine is closed; build a new one.")
        self.scheduler.check_free(session)

    async def close_session(self, session: str) -> None:
        """Drop a session's cache; a request still running in it ends with finish = abort."""
        for request in self.scheduler.pending():
            if request.session == session:
                self.scheduler.end(request)
        self._slots.forget(session)

    async def abort(self) -> None:
        """End every request, running or waiting, with its tokens so far; finish = abort."""
        for request in self.scheduler.pending():
            self.scheduler.end(request)

    def pause(self) -> None:
        """Stop between two tokens: running and new requests wait for `resume`. Abort and close still work."""
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False
        self.memory.go_on()

    async def release_memory(self, tags: Collection[MemoryTag]) -> int:
        """Free weights, cache or both, and hold all requests between two tokens; see `Engine`."""
        return self.memory.release(tags)

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Allocate what was released; requests go on when nothing is missing any more; see `Engine`.

        Raises:
            EngineError: the cache is asked for, and the weights that were released have not been sent again.
        """
        self.memory.resume(tags)

    async def close(self) -> None:
        """Abort, then free the cache. A closed engine refuses requests."""
        await self.abort()
        self._closed = True
        await self.scheduler.ended()
        self.memory.close()


def _parameters_of(model: PreTrainedModel, *, copies: bool) -> Parameters | ModelParameters:
    """A model's weights, for the decoder where it has a table of the family.

    copies: whether others have the model, too.
    """
    long_ropes(model.config)
    architecture = read_architecture(model.config)
    if architecture is None:
        return ModelParameters((deepcopy(model) if copies else model).eval())
    return Parameters.load(architecture, dict(named_weights(model)), model.dtype)


def _expert_layers_of(parameters: Parameters | ModelParameters) -> ExpertLayers | None:
    """The layers whose experts can be returned."""
    routers = parameters.routers if isinstance(parameters, ModelParameters) else None
    return None if routers is None else routers.layers


def _slots_of(max_slots: int, context_len: int, layers: ExpertLayers | None) -> Slots:
    routed = None if layers is None else RoutedSlots(layers, max_slots, context_len)
    return Slots(max_slots, context_len, routed)


def _decoder_of(
    parameters: Parameters | ModelParameters, slots: Slots, max_slots: int, context_len: int
) -> ForwardPass:
    if isinstance(parameters, ModelParameters):
        return ModelDecoder(max_slots, context_len, slots.routed)
    return Decoder(parameters.architecture, max_slots, context_len, parameters.dtype)


def _stage_of(parameters: Parameters | ModelParameters) -> Stage:
    if isinstance(parameters, ModelParameters):
        return lambda _, threads, install: StagedModel(parameters.model, threads.loader, install)
    return partial(StagedParameters, parameters.architecture, parameters.dtype)


class _Intake(NamedTuple):
    """What an engine takes. can_decode: whether it has the text of tokens, which stop strings need."""

    engine: EmbeddedEngine
    can_decode: bool
    eos_token_ids: tuple[int, ...]

    def sampled(self, prompt_ids: Sequence[int], sampling: Sampling, session: str) -> Request:
        """A request to sample a continuation.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens exceed max_context_len.
            EngineError: it is invalid.
        """
        prompt = self._prompt(prompt_ids)
        num_begun = 0 if sampling.continues is None else len(sampling.continues.token_ids)
        if sampling.max_new_tokens <= num_begun:
            raise EngineError("a request needs a prompt and at least one token to sample; give it both.")
        if len(prompt) + sampling.max_new_tokens > self.engine.max_context_len:
            raise RequestTooLargeError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens = {sampling.max_new_tokens} exceed "
                f"max_context_len = {self.engine.max_context_len}; raise max_context_len or ask for fewer "
                "tokens."
            )
        if sampling.stop and not self.can_decode:
            raise EngineError("stop strings need the engine's `decode`; give it one, or use stop_token_ids.")
        if sampling.return_routed_experts not in (None, self.engine.expert_layers):
            raise EngineError(
                "return_routed_experts asks for layers of experts that this engine's model does not have; "
                "leave it out."
            )
        if not 0 <= sampling.routed_experts_start_len <= len(prompt):
            raise EngineError(
                f"a prompt of {len(prompt)} tokens has no experts from "
                f"{sampling.routed_experts_start_len} on."
            )
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        stops = (*sampling.stop_token_ids, *self.eos_token_ids)
        return Request(prompt, sampling, session, seed % 2**64, stops, _answer())

    def scored(self, token_ids: Sequence[int], start: int, session: str) -> Request:
        """A request for the logprobs of the tokens after `start`.

        Raises:
            RequestTooLargeError: they exceed max_context_len.
            EngineError: it is invalid.
        """
        prompt = self._prompt(token_ids)
        if not 0 <= start <= len(prompt):
            raise EngineError(f"a prompt of {len(prompt)} tokens cannot be scored from {start} on.")
        if len(prompt) > self.engine.max_context_len:
            raise RequestTooLargeError(
                f"a prompt of {len(prompt)} tokens exceeds max_context_len = {self.engine.max_context_len}; "
                "raise max_context_len."
            )
        return Request(prompt, Sampling(0), session, 0, (), _answer(), score_from=start)

    def _prompt(self, prompt_ids: Sequence[int]) -> IntArray:
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        if not len(prompt):
            raise EngineError("a request needs a prompt and at least one token to sample; give it both.")
        if prompt.min() < 0 or prompt.max() >= self.engine.vocab_size:
            raise EngineError(
                f"the prompt's tokens go from {prompt.min()} to {prompt.max()}, the vocabulary is 0 to "
                f"{self.engine.vocab_size - 1}; encode it with the model's own tokenizer."
            )
        return prompt


def _answer() -> asyncio.Future[Completion]:
    return asyncio.get_running_loop().create_future()
