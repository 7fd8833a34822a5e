"""A small, deterministic engine for tests: no network, no torch, all guarantees of an Engine.

The next token depends only on the last one, through a seeded table of logits; or a script gives the
completion. One token takes one iteration of the event loop, so that requests interleave, and aborts and
weights arrive between two tokens of a request, as they do in a real engine.

Importing this is free of torch; only a weight update needs it, for the checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentrl.engine.watches import Watches
from agentrl.errors import EngineError, RequestTooLargeError
from agentrl.types import KEPT_IDS, Completion, Extra, Finish, FloatArray, NumberArray
from agentrl.types.seams import Bucket, MemoryTag, Sampling, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.weights.staging import Transaction

Answer = Callable[[Sequence[int]], Sequence[int]]
"""The completion of a prompt; the turn ends with it."""

Annotate = Callable[[Sequence[int], Sequence[int]], Mapping[str, Extra]]
"""Extras of a completion, from its prompt and its tokens."""


def _none(prompt: Sequence[int], tokens: Sequence[int]) -> Mapping[str, Extra]:
    del prompt, tokens
    return {}


def seeded_table(vocab_size: int, seed: int) -> FloatArray:
    """Logits [last token, next token] of the fake model with this seed."""
    return np.random.default_rng(seed).normal(0, 1.5, (vocab_size, vocab_size)).astype(np.float32)


@dataclass(eq=False, slots=True)
class _Running:
    prompt: list[int]
    sampling: Sampling
    session: str
    cached_tokens: int
    script: list[int] | None
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_ids: list[NumberArray] = field(default_factory=list)
    extras: Annotate = _none
    aborted: bool = False

    def completion(self, finish: Finish, matched: str | int | None = None) -> Completion:
        has_kept = self.sampling.keeps_ids and self.script is None
        kept = {KEPT_IDS: Extra.of_lists(self.kept_ids)} if has_kept else {}
        return Completion(
            np.asarray(self.tokens, np.int32),
            np.asarray(self.logprobs, np.float32),
            np.asarray(self.versions, np.int32),
            finish,
            matched,
            self.cached_tokens,
            self.sampling.temperature,
            {**kept, **self.extras(self.prompt, self.tokens)},
        )


class FakeEngine:
    """Samples from a table, or returns scripted completions.

    Args:
        vocab_size: tokens are 0 to vocab_size - 1.
        table_seed: seeds the table of version 0.
        max_slots: concurrent requests; more of them wait, in order.
        max_context_len: most tokens of prompt and completion together.
        answer: the scripted completion of a prompt; its logprobs are 0. None = sample.
        decode: tokens to text, for stop strings; default: `chr` of each token.

    extras (an attribute): further arrays of a completion, from its prompt and its tokens; none by default.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 128,
        table_seed: int = 0,
        max_slots: int = 4,
        max_context_len: int = 256,
        answer: Answer | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.max_context_len = max_context_len
        self._table = seeded_table(vocab_size, table_seed)
        self._version = 0
        self._slots = asyncio.Semaphore(max_slots)
        self._answer = answer
        self._decode = decode or (lambda ids: "".join(map(chr, ids)))
        self.extras: Annotate = _none
        self._running: list[_Running] = []
        self._cached: dict[str, list[int]] = {}
        self._watches = Watches()
        self.watched = self._watches.watched
        self._unseeded = 0
        self._closed = False
        self._released: set[MemoryTag] = set()
        self._lacks_weights = False

    @property
    def version(self) -> int:
        """The version of the table that serves now."""
        return self._version

    @property
    def sink(self) -> FakeEngine:
        """The engine is its own sink; the weights are one tensor, `table`, float32 [V, V]."""
        return self

    @property
    def counts(self) -> Mapping[str, int]:
        """Empty: no request of this engine is retried or lost."""
        return {}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of `prompt_ids`.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens exceed max_context_len.
            EngineError: the engine is closed.
        """
        request = self._accept(list(prompt_ids), sampling, session)
        self._running.append(request)
        try:
            async with self._slots:
                completion = await self._sample(request)
        finally:
            self._running.remove(request)
        # The token sampled last is not in the cache yet, as in any engine.
        self._cached[session] = (request.prompt + request.tokens)[:-1]
        return completion

    async def close_session(self, session: str) -> None:
        """Drop a session's cache; a request running in it is aborted."""
        for request in self._running:
            request.aborted |= request.session == session
        self._cached.pop(session, None)

    async def abort(self) -> None:
        """End every request with its tokens so far; finish = abort."""
        for request in self._running:
            request.aborted = True

    async def release_memory(self, tags: Collection[MemoryTag]) -> int:
        """Hold all requests, and drop caches and weights; the bytes are those of the table."""
        self._released |= set(tags)
        self._cached.clear()
        if "weights" not in tags:
            return 0
        self._lacks_weights = True
        return self._table.nbytes

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Go on, where nothing is missing any more.

        Raises:
            EngineError: the cache is asked for, and the weights that were released have not been sent again.
        """
        if "kv_cache" in tags and self._lacks_weights:
            raise EngineError("the engine's weights were released; send some, then resume its kv_cache.")
        self._released -= set(tags)

    async def close(self) -> None:
        """Abort, then refuse all requests."""
        self._closed = True
        await self.abort()
        self._cached.clear()

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[Transaction]:
        """Start sending `version`.

        Raises:
            EngineError: the manifest does not list exactly the table.
        """
        expected = TensorSpec("table", self._table.shape, "float32")
        if list(manifest) != [expected]:
            raise EngineError(f"the fake engine takes one tensor, {expected}; send that alone.")
        from agentrl.weights.staging import Transaction

        yield Transaction(manifest, version, _StagedTable(lambda table: self._install(table, version)))

    def _install(self, table: FloatArray, version: int) -> None:
        self._table, self._version, self._lacks_weights = table, version, False
        self._cached.clear()

    def _accept(self, prompt: list[int], sampling: Sampling, session: str) -> _Running:
        if self._closed:
            raise EngineError("the engine is closed; build a new one.")
        if not all(0 <= token < len(self._table) for token in prompt):
            raise EngineError(
                f"the prompt has tokens other than 0 to {len(self._table) - 1}; encode it again."
            )
        if len(prompt) + sampling.max_new_tokens > self.max_context_len:
            raise RequestTooLargeError(
                f"a prompt of {len(prompt)} tokens and max_new_tokens = {sampling.max_new_tokens} exceed "
                f"max_context_len = {self.max_context_len}; raise max_context_len or ask for fewer tokens."
            )
        if any(request.session == session for request in self._running):
            raise EngineError(f"session {session} already runs a request; wait for it or name another.")
        self._unseeded += sampling.seed is None
        seed = self._unseeded if sampling.seed is None else sampling.seed
        cached = self._cached.get(session, [])
        num_cached = min(_shared_prefix(cached, prompt), len(prompt) - 1)
        script = list(self._answer(prompt)) if self._answer else None
        running = _Running(prompt, sampling, session, num_cached, script, seed % 2**64, extras=self.extras)
        if sampling.continues is not None:
            running.tokens += sampling.continues.token_ids.tolist()
            running.logprobs += sampling.continues.logprobs.tolist()
            running.versions += sampling.continues.versions.tolist()
            running.kept_ids += sampling.kept_before()
        return running

    async def _sample(self, request: _Running) -> Completion:
        sampling = request.sampling
        stops = set(sampling.stop_token_ids)
        while True:
            await asyncio.sleep(0)
            if request.aborted:
                return request.completion(Finish.ABORT)
            if self._released or self._lacks_weights:
                continue
            if request.script is not None and len(request.tokens) == len(request.script):
                return request.completion(Finish.STOP)
            token, logprob = self._next(request)
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.versions.append(self._version)
            if request.session in self._watches:
                self._watches[request.session]([token])
            text = self._decode(request.tokens) if sampling.stop else ""
            matched = next((stop for stop in sampling.stop if stop in text), None)
            if token in stops or matched is not None:
                return request.completion(Finish.STOP, token if token in stops else matched)
            if len(request.tokens) == sampling.max_new_tokens:
                return request.completion(Finish.LENGTH)

    def _next(self, request: _Running) -> tuple[int, float]:
        if request.script is not None:
            return request.script[len(request.tokens)], 0.0
        last = (request.prompt + request.tokens)[-1]
        logits = self._table[last].astype(np.float64)
        sampling = request.sampling
        logprobs = _log_softmax(logits / (sampling.temperature or 1.0))
        if sampling.temperature == 0:
            token = int(logprobs.argmax())
        else:
            weights = _cut(np.exp(logprobs), sampling)
            point = np.random.default_rng((request.seed, len(request.tokens))).random()
            token = int(np.searchsorted(weights.cumsum(), point * weights.sum(), side="right"))
            if sampling.keeps_ids:
                request.kept_ids.append(np.flatnonzero(weights).astype(np.int32))
                logprobs = logprobs - np.log(weights.sum())
        return token, float(logprobs[token])


class _StagedTable:
    """A new table that does not serve yet."""

    def __init__(self, install: Callable[[FloatArray], None]) -> None:
        self._install = install
        self._table: Tensor | None = None

    async def add(self, bucket: Bucket) -> None:
        from agentrl.weights.codec import unpack

        for _, self._table in unpack(bucket):
            pass

    async def checksum(self) -> int:
        from agentrl.weights.checksum import checksum

        return checksum([] if self._table is None else [("table", self._table)])

    async def install(self) -> None:
        assert self._table is not None, "a transaction commits complete versions"
        self._install(self._table.numpy())


def _shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max()
    normalised: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalised


def _cut(probs: npt.NDArray[np.float64], sampling: Sampling) -> npt.NDArray[np.float64]:
    """Zero the probabilities that top-k or top-p excludes; both count in the whole distribution."""
    order = np.argsort(-probs, kind="stable")
    ordered = probs[order]
    before = ordered.cumsum() - ordered
    ordered[1:][before[1:] > sampling.top_p] = 0
    if sampling.top_k:
        ordered[sampling.top_k :] = 0
    cut = np.zeros_like(probs)
    cut[order] = ordered
    return cut
