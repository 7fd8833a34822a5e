"""The embedded engine: requests in, completions out, one decode step at a time in the event loop.

The pump is a task that consumes the queue of waiting requests. It runs while there are requests, one step
per iteration of the event loop, so that everything else (aborts, weights, new requests) happens at a token
boundary. It ends when no request waits or runs; `close` aborts the rest. When it raises, all requests fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from agentrl.engine.embedded.architecture import eos_of, read_architecture
from agentrl.engine.embedded.decoder import Decoder
from agentrl.engine.embedded.intake import Intake
from agentrl.engine.embedded.parameters import Parameters
from agentrl.engine.embedded.sink import EmbeddedSink
from agentrl.engine.embedded.slots import Request, Slots, no_tokens
from agentrl.engine.embedded.step import Stepper
from agentrl.engine.embedded.turns import Turns
from agentrl.errors import EngineError
from agentrl.runtime.clocks import BlockTimer, Waits
from agentrl.runtime.collector import freed_bytes
from agentrl.types import Completion, Finish, FloatArray
from agentrl.types.seams import MemoryTag, Sampling
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.loading import open_directory

Decode = Callable[[Sequence[int]], str]

# Iterations of the event loop between two steps: how many in a row may bring no request, how many in all.
_PATIENCE = 3
_MAX_YIELDS = 8
DEFAULT_CONTEXT = 512
"""Tokens of a slot, where nothing else is configured."""


class EmbeddedEngine:
    """Continuous batching over the weights of a Llama, Qwen2 or Qwen3 model, on the CPU.

    A session keeps its slot, and the keys and values in it, between its requests: the next request
    computes only the tokens after the cached ones. When requests wait, slots of idle sessions are evicted,
    least recently used first; their tokens are then computed again.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        max_slots: int,
        max_context_len: int | None,
        decode: Decode | None,
        eos_token_ids: Sequence[int],
        deterministic: bool = False,
    ) -> None:
        architecture = parameters.architecture
        model_limit = architecture.max_position_embeddings
        self.max_context_len = min(max_context_len or DEFAULT_CONTEXT, model_limit)
        self.max_slots = max_slots
        dtype = parameters.outer.embedding.dtype
        self._slots = Slots(max_slots, self.max_context_len)
        self._decoder = Decoder(architecture, max_slots, self.max_context_len, dtype)
        self._stepper = Stepper(self._slots, self._decoder, parameters, decode, deterministic=deterministic)
        self._intake = Intake(
            architecture.vocab_size, self.max_context_len, decode is not None, tuple(eos_token_ids)
        )
        self._waiting: Turns[Request] = Turns()
        self._pump: asyncio.Task[None] | None = None
        self._busy: set[str] = set()
        self._closed = False
        self._paused = False
        self._released: set[MemoryTag] = set()
        self._waits = Waits()
        self._between_steps = BlockTimer()
        self._sink = EmbeddedSink(architecture, dtype, self._install, lambda: self._between_steps.total_s)

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
            model: a LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM.
            max_slots: requests decoded at once.
            max_context_len: tokens a slot holds, prompt and completion; default 512, at most the
                model's max_position_embeddings.
            decode: token ids to text; needed for stop strings only.
            eos_token_ids: tokens that always end a completion; default: the model's own.
            deterministic: the tokens and logprobs of a request, bit for bit, are a function of weights,
                prompt and seed, whatever else runs; slower.

        Raises:
            ModelLoadError: the engine does not support the architecture.
        """
        architecture = read_architecture(model.config)
        parameters = Parameters.load(architecture, dict(named_weights(model)), model.dtype)
        return cls(
            parameters,
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
            ModelLoadError: the directory is missing or broken, or the architecture is not supported.
        """
        model = open_directory(directory, dtype)
        return cls.from_model(
            model,
            max_slots=max_slots,
            max_context_len=max_context_len,
            decode=decode,
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
    def vocab_size(self) -> int:
        """The number of tokens of the vocabulary."""
        return self._intake.vocab_size

    @property
    def num_requests(self) -> int:
        """The number of requests that run or wait."""
        return len(self._pending())

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait for a slot, and tokens of those that run, prompts included (counts)."""
        return len(self._waiting), int(self._slots.num_tokens[self._slots.active].sum())

    @property
    def cache_bytes(self) -> int:
        """The size of the key-value cache, from max_slots x max_context_len (bytes); 0 = released."""
        return self._decoder.num_bytes

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str, client: tuple[str, ...] = ()
    ) -> Completion:
        """Sample a continuation of the full prefix `prompt_ids`; cancelling frees the slot.

        client: whose request it is; those of several clients take turns for the slots, see `Turns`.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens exceed max_context_len.
            EngineError: the engine is closed, the request is invalid, the session is busy, or a step failed.
        """
        self._check_free(session)
        return await self._answered(self._intake.sampled(prompt_ids, sampling, session), client)

    async def score(
        self, token_ids: Sequence[int], start: int, *, session: str, client: tuple[str, ...] = ()
    ) -> FloatArray | None:
        """The logprobs of `token_ids[start + 1:]`, each given all tokens before it (nats, temperature 1).

        The session keeps the keys and values, also for `generate`. client: as in `generate`.

        Returns:
            float32 [len(token_ids) - start - 1], or empty; None = the request was ended by an abort.

        Raises:
            RequestTooLargeError: the tokens exceed max_context_len.
            EngineError: as in `generate`.
        """
        self._check_free(session)
        request = self._intake.scored(token_ids, start, session)
        await self._answered(request, client)
        return request.scores

    def _check_free(self, session: str) -> None:
        if self._closed:
            raise EngineError("the engine is closed; build a new one.")
        if session in self._busy:
            raise EngineError(
                f"session {session} already runs a request; wait for it or name another session."
            )

    async def _answered(self, request: Request, client: tuple[str, ...]) -> Completion:
        request.client = client
        self._waiting.add(request, client)
        self._busy.add(request.session)
        self._start()
        try:
            with self._waits.entered():
                return await request.answer
        except asyncio.CancelledError:
            self._discard(request)
            raise
        finally:
            self._busy.discard(request.session)

    async def close_session(self, session: str) -> None:
        """Drop a session's cache; a request still running in it ends with finish = abort."""
        for request in self._pending():
            if request.session == session:
                self._end(request)
        self._slots.forget(session)

    async def abort(self) -> None:
        """End every request, running or waiting, with its tokens so far; finish = abort."""
        for request in self._pending():
            self._end(request)

    def pause(self) -> None:
        """Stop between two tokens: running and new requests wait for `resume`. Abort and close still work."""
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False
        self._go_on()

    async def release_memory(self, tags: Collection[MemoryTag]) -> int:
        """Free weights, cache or both, and hold all requests between two tokens; see `Engine`."""
        self._released |= set(tags)
        self._waits.leave()
        return freed_bytes(self._free)

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Allocate what was released; requests go on when nothing is missing any more; see `Engine`.

        Raises:
            EngineError: the cache is asked for, and the weights that were released have not been sent again.
        """
        resumed = self._released & set(tags)
        if "kv_cache" in resumed:
            if self._stepper.parameters is None:
                raise EngineError("the engine's weights were released; send some, then resume its kv_cache.")
            self._decoder.allocate()
        self._released -= resumed
        self._go_on()

    def rename(self, version: int) -> None:
        """Set the version of the current weights; every later token carries it."""
        self._stepper.version = version

    def drop_caches(self) -> None:
        """Drop all cached keys and values; running requests compute theirs again."""
        self._slots.drop_caches()

    def partial_completion(self, session: str) -> Completion | None:
        """The tokens that a session's running request has sampled so far, as if it were aborted."""
        for request in self._slots.requests:
            if request is not None and request.session == session and request.slot is not None:
                return self._slots.completion(request.slot, Finish.ABORT, None)
        return None

    async def close(self) -> None:
        """Abort, then free the cache. A closed engine refuses requests."""
        await self.abort()
        self._closed = True
        # A pump that is done may belong to another event loop, already closed.
        if self._pump is not None and not self._pump.done():
            await asyncio.wait([self._pump])
        self._decoder.free()

    def _install(self, parameters: Parameters, version: int) -> None:
        self._stepper.parameters = parameters
        self._stepper.version = version
        self.drop_caches()
        self._go_on()

    @property
    def lacks_memory(self) -> bool:
        """Whether weights or cache are released, so that all requests are held."""
        return bool(self._released) or self._stepper.parameters is None

    def _go_on(self) -> None:
        if not self.lacks_memory:
            self._waits.come_back()
            if self._pending():
                self._start()

    def _free(self) -> None:
        if "weights" in self._released:
            self._stepper.parameters = None
        if "kv_cache" in self._released:
            self.drop_caches()
            self._decoder.free()

    def _start(self) -> None:
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run(), name="agentrl-engine-pump")
            self._pump.add_done_callback(self._settle)

    async def _run(self) -> None:
        patience = _PATIENCE
        while True:
            with self._between_steps.running():
                await self._gather(patience)
                if self._paused or self.lacks_memory:
                    return
                self._admit()
                if not self._slots.active.any():
                    return
            finished = self._stepper.step()
            for request, completion in finished:
                if not request.answer.done():
                    request.answer.set_result(completion)
            patience = _PATIENCE if finished else 1

    async def _gather(self, patience: int) -> None:
        """Let finished sessions send their next requests, until `patience` iterations brought none."""
        num_empty = 0
        for _ in range(_MAX_YIELDS):
            before = len(self._waiting)
            await asyncio.sleep(0)
            num_empty = num_empty + 1 if len(self._waiting) == before else 0
            if num_empty >= patience:
                return

    def _admit(self) -> None:
        """Admit waiting requests by turns; those of a cached session first, because they need no new slot."""
        slots = self._slots
        for request in [each for each in self._waiting if slots.sessions.idle_slot(each.session) is not None]:
            self._waiting.remove(request, request.client)
            slots.admit(request)
        while self._waiting and slots.sessions.is_any_free:
            slots.admit(self._waiting.pop())

    def _pending(self) -> list[Request]:
        return [request for request in (*self._slots.requests, *self._waiting) if request is not None]

    def _end(self, request: Request) -> None:
        completion = request.sampling.continues or no_tokens()
        if request.slot is not None:
            completion = self._slots.completion(request.slot, Finish.ABORT, None)
            self._slots.keep(request.slot)
        else:
            self._waiting.remove(request, request.client)
        if not request.answer.done():
            request.answer.set_result(completion)

    def _discard(self, request: Request) -> None:
        """Drop a request whose caller was cancelled, and its session's cache."""
        if request.slot is not None and self._slots.requests[request.slot] is request:
            self._slots.release(request.slot)
        elif request in self._waiting:
            self._waiting.remove(request, request.client)

    def _settle(self, pump: asyncio.Task[None]) -> None:
        """Fail the pending requests where the pump raised or was cancelled."""
        error = None if pump.cancelled() else pump.exception()
        if error is None and not pump.cancelled():
            return
        reason = "was cancelled" if error is None else f"failed: {type(error).__name__}: {error}"
        for request in self._pending():
            if not request.answer.done():
                failure = EngineError(f"the embedded engine {reason}; the request was not finished.")
                failure.__cause__ = error
                request.answer.set_exception(failure)
        self._waiting.clear()
        self._slots.clear()
