"""Engines: what samples tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from agentrl.types import KEPT_IDS, Completion, ExpertLayers, NumberArray, RoutedArray, known_rows
from agentrl.types.seams.weights import WeightSink


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample.

    max_new_tokens: at most (count). temperature: 0 = greedy. top_p: 1 = off. top_k: 0 = off.
    stop: strings that end a turn. stop_token_ids: tokens that do. seed: None = any. continues: what a stopped
    request has sampled: the completion begins with it. return_kept_ids: where top_p or top_k cut, the
    completion has the extra `KEPT_IDS`, and its logprobs are of the distribution renormalised over these ids.
    return_routed_experts: the completion has the extra `ROUTED_EXPERTS` of these layers, and so has the
    prompt from position `routed_experts_start_len` on; None = not.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    continues: Completion | None = None
    return_kept_ids: bool = False
    return_routed_experts: ExpertLayers | None = None
    routed_experts_start_len: int = 0

    @property
    def keeps_ids(self) -> bool:
        """Whether the completion has the extra `KEPT_IDS`: it is asked for, and something is cut.

        Greedy sampling takes no part of a distribution.
        """
        cuts = self.top_p < 1 or self.top_k > 0
        return self.return_kept_ids and cuts and self.temperature > 0

    def kept_before(self) -> list[NumberArray]:
        """The kept ids of each token of `continues`, if they are asked for."""
        begun = self.continues
        if begun is None or not self.keeps_ids:
            return []
        kept = begun.extras.get(KEPT_IDS)
        return [np.zeros(0, np.int32)] * len(begun.token_ids) if kept is None else kept.lists()

    def routed_before(self) -> RoutedArray | None:
        """The experts that are known from `continues`, [rows, layers, k], from `routed_experts_start_len` on.

        None = they are not asked for.
        """
        layers, begun = self.return_routed_experts, self.continues
        if layers is None:
            return None
        rows = None if begun is None else known_rows(begun.prompt_extras, begun.extras)
        return layers.unknown(0) if rows is None else rows


class Policy(Protocol):
    """Samples tokens."""

    @property
    def version(self) -> int:
        """The version of the weights that serve now."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
        """Sample a continuation of the complete prefix `prompt_ids`.

        Cancelling the call aborts the request and frees its cache.

        Raises:
            RequestTooLargeError: prompt and max_new_tokens can never fit.
        """

    async def close_session(self, session: str) -> None:
        """Free the cache of a session; unknown sessions are fine."""


Watch: TypeAlias = Callable[[Sequence[int]], None]
"""Is told the tokens that were sampled since it was told the last ones."""


@runtime_checkable
class StreamingPolicy(Policy, Protocol):
    """A policy that shows tokens as they are sampled."""

    def watched(self, session: str, watch: Watch) -> AbstractContextManager[None]:
        """Tell `watch` during the block the tokens of the session's request, after each step.

        Those of its last step may be missing: they are in its completion.
        """


class RunningPolicy(Policy, Protocol):
    """A policy whose requests can be stopped, and which holds resources until it is closed."""

    async def abort(self) -> None:
        """End every running request with what it has so far, finish = abort."""

    async def close(self) -> None:
        """Abort, then free everything."""


MemoryTag: TypeAlias = Literal["weights", "kv_cache"]
"""A part of an engine's memory: its weights, or the cache of keys and values. The words are SGLang's."""


class PolicyClient(Protocol):
    """A process that sends its own requests to the servers of an engine. It is held until `release`."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of its unusual requests so far, by name; see `Engine.counts`."""

    async def hold(self) -> float:
        """Have it send no request; running ones end with their tokens so far, and go on afterwards.

        The result is when the first of these had ended, or now (`time.perf_counter`).
        """

    def release(self, salt: str | None) -> None:
        """Have it send requests again. salt: of the weights that the servers hold; None = unknown."""


class PolicyClients(Protocol):
    """The processes that send their own requests to the servers of an engine."""

    def add(self, client: PolicyClient) -> None:
        """Hold it from now on whenever requests are held, and count its requests."""

    def remove(self, client: PolicyClient) -> None:
        """It has ended."""


class Engine(RunningPolicy, Protocol):
    """A running policy that takes new weights."""

    @property
    def sink(self) -> WeightSink:
        """What takes its new weights."""

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of unusual events of requests and servers so far, by name."""

    async def release_memory(self, tags: Collection[MemoryTag]) -> int | None:
        """Free this memory until `resume_memory`, and hold all requests meanwhile.

        The result is what the system got back (bytes); None: unknown. Running requests stop between two
        tokens and go on afterwards, new ones wait, with their clocks. Send weights before resuming the cache.
        """

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        """Allocate released memory again; requests go on when all of it is there, and weights have arrived.

        Raises:
            EngineError: the cache is asked for, and no weights were sent since theirs were released.
        """
