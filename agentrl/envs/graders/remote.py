"""A reward model behind HTTP."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import httpx2

from agentrl.envs.graders.answer import tail
from agentrl.errors import ConfigError, GradingError, ToolError
from agentrl.http.guarded import AllowedAddresses, bearer
from agentrl.http.requests import Backoff, Retrying, StatusError, body_of, failure_kind, json_of, off_loop
from agentrl.tools import Shared
from agentrl.tools.search.batching import Batcher
from agentrl.types import JSON, Task

_CONNECT_TIMEOUT_S = 5.0
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 10.0
_MAX_REPLY_BYTES = 8 << 20
_SCORES = ("reward", "score", "rewards", "scores")


class Item(NamedTuple):
    """What a reward model grades."""

    prompt: str
    response: str
    label: str


Score = Callable[[Item], Awaitable[float]]


@dataclass(frozen=True, kw_only=True)
class RemoteGrader:
    """The reward of an answer by a model behind HTTP: a finite number.

    Concurrent answers share requests, and requests share connections. A request is sent again, after an
    exponential backoff, where the connection breaks or the server returns 429, 502, 503 or 504. What fails
    after that fails the episode: it is played again, never scored as 0.

    url: of the server; no other origin is ever reached.
    protocol: `batch`, as OpenRLHF's reward servers: {"query": [prompt + response], "prompts": [...],
        "responses": [...], "labels": [...]}, and the reply {"rewards": [...]}. `single`, as slime's:
        {"prompt", "response", "label"}, and the reply a number, or {"score": ...}.
    timeout_s: for one answer in total: waiting in the queue, all attempts and the waits between them. The
        environment's `reward_timeout_s` is a limit, too.
    attempts: how often a request is sent, at most.
    max_batch: answers of one request. max_requests: requests at a time.
    key_env: the environment variable with a bearer token; None = no token is sent.

    Raises:
        ConfigError: the address is invalid, a setting is out of range, or the variable holds no key.
    """

    url: str
    protocol: Literal["batch", "single"] = "batch"
    timeout_s: float = 30.0
    attempts: int = 5
    max_batch: int = 64
    max_requests: int = 4
    key_env: str | None = None
    counts: Counter[str] = field(default_factory=Counter, init=False, compare=False, repr=False)
    _shared: Shared[Score] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if min(self.attempts, self.max_batch, self.max_requests) < 1 or not 0 < self.timeout_s < math.inf:
            raise ConfigError(
                "the grader `remote` needs a timeout_s above 0, and attempts, max_batch and max_requests of "
                "at least 1."
            )
        AllowedAddresses(self.url)
        self._headers()
        object.__setattr__(self, "_shared", Shared(self._connected, "remote grader"))

    async def grade(self, task: Task, answer: str) -> float:
        """The reward of an answer.

        Waits for: its batch. Unblocked by: `timeout_s`. On cancellation: a request without waiting answers is
        cancelled.

        Raises:
            GradingError: `unavailable` (no connection, no reply in time, or busy to the last attempt),
                `crashed` (the connection broke, or status 500), `refused` (401, 403, or a redirect to another
                origin), `protocol` (any other reply).
        """
        prompt = "\n".join(message.text for message in task.prompt)
        score = await self._shared.get()
        try:
            async with asyncio.timeout(self.timeout_s):
                return await score(Item(prompt, tail(answer), task.answer or ""))
        except TimeoutError:
            raise GradingError("unavailable", f"{self.url} gave no reward in {self.timeout_s:g} s") from None
        except ToolError as error:
            raise GradingError(error.kind, error.detail) from error

    def _headers(self) -> dict[str, str]:
        return {} if self.key_env is None else bearer(os.environ.get(self.key_env, ""), self.key_env)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Score]:
        async with AllowedAddresses(self.url).client(timeout_s=None, headers=self._headers()) as http:
            http.timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
            batcher = Batcher[Item, float](
                partial(self._rewards, http),
                max_batch=self.max_batch if self.protocol == "batch" else 1,
                max_in_flight=self.max_requests,
            )
            try:
                yield batcher.submit
            finally:
                await batcher.close()

    async def _rewards(self, http: httpx2.AsyncClient, items: Sequence[Item]) -> Sequence[float]:
        content = json.dumps(_batch(items) if self.protocol == "batch" else items[0]._asdict()).encode()
        retrying = Retrying(Backoff(self.attempts, _FIRST_WAIT_S, _LONGEST_WAIT_S))
        try:
            body = await retrying(partial(self._sent, http, content), self._count_retry)
            return await off_loop(partial(_rewards_in, number=len(items)), body)
        except (httpx2.HTTPError, StatusError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise GradingError(failure_kind(error), f"{self.url}: {reason}") from error

    async def _sent(self, http: httpx2.AsyncClient, content: bytes) -> bytes:
        self.counts["requests"] += 1
        return await body_of(http, "POST", httpx2.URL(self.url), content, max_bytes=_MAX_REPLY_BYTES)

    def _count_retry(self, error: Exception) -> None:
        del error
        self.counts["retries"] += 1


def _batch(items: Sequence[Item]) -> dict[str, list[str]]:
    return {
        "query": [item.prompt + item.response for item in items],
        "prompts": [item.prompt for item in items],
        "responses": [item.response for item in items],
        "labels": [item.label for item in items],
    }


def _rewards_in(body: bytes, number: int) -> list[float]:
    """The rewards in a reply.

    Raises:
        ValueError: it holds another number of them, or one that is not finite.
    """
    reply = json_of(body)
    if isinstance(reply, dict):
        reply = next((reply[name] for name in _SCORES if name in reply), None)
    values = reply if isinstance(reply, list) else [reply]
    if len(values) != number:
        raise ValueError(f"the reply has {len(values)} rewards for {number} answers")
    return [_finite(value) for value in values]


def _finite(value: JSON) -> float:
    try:
        reward = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise ValueError(f"the reply has {repr(value)[:80]} in place of a finite number")
    return reward
