"""A model of players: groups whose episodes take turns between an engine and the environment."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import ClassVar

from agentrl.data import Prompt
from agentrl.rollout.group import GroupInProgress, GroupOutcome
from agentrl.types import Ending, Episode, Failure, Group, Limits, Task
from agentrl_simulate.engine import SimulatedEngines
from agentrl_simulate.virtual_time import now_s
from agentrl_simulate.workload import EpisodePlan, Workload

TASK = Task.ask("simulated", "")
"""The task of all prompts of a simulation: nobody reads it."""


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedGroup(Group):
    """A complete group without the content of its episodes.

    sampled: tokens of the policy (count) by their version. num_tokens: those that are trained on, prompts
    included (count). num_turns: of all episodes (count).
    """

    sampled: dict[int, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_turns: int = 0


@dataclass(slots=True)
class _Played:
    """What the episodes of a group have added up to so far."""

    sampled: dict[int, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_turns: int = 0


class SimulatedWorkers:
    """Processes that play: each handles one turn at a time. cpu_s: of a turn (seconds)."""

    def __init__(self, number: int, cpu_s: float) -> None:
        self._free_at_s = [0.0] * number
        self._cpu_s = cpu_s
        self.busy_s = 0.0

    async def turn(self, index: int) -> None:
        """Handle a turn of the group of a prompt's number, after the turns that came before it."""
        if not self._cpu_s:
            return
        worker = index % len(self._free_at_s)
        end_s = self._free_at_s[worker] = max(self._free_at_s[worker], now_s()) + self._cpu_s
        self.busy_s += self._cpu_s
        await asyncio.sleep(end_s - now_s())


@dataclass(slots=True)
class SimulatedPlayer:
    """Plays groups as `GroupPlayer` does, with the durations of a workload and of a model of engines.

    request_s: of a request outside of the engine. timeout_s: of a group (seconds). retries: of an episode
    that fails (count). started, broken: groups. retried, cut: episodes that were played again, and those that
    the timeout ended (counts).
    """

    workload: Workload
    engines: SimulatedEngines
    workers: SimulatedWorkers
    request_s: float
    retries: int
    timeout_s: float = math.inf
    started: int = 0
    retried: int = 0
    broken: int = 0
    cut: int = 0

    stop: ClassVar[Callable[[], Awaitable[None]] | None] = None
    """A simulation ends with what is in flight."""

    async def play(self, prompt: Prompt, version: int, begun: GroupInProgress | None = None) -> GroupOutcome:
        """Play a group; `version` is the policy's when it starts.

        Waits for: all siblings. On cancellation: every sibling is cancelled and gives its places back.
        """
        del begun
        self.started += 1
        plan, played = self.workload.group(prompt.index), _Played()
        ends_at_s = now_s() + self.timeout_s
        async with asyncio.TaskGroup() as siblings:
            ends = [
                siblings.create_task(self._sibling(prompt.index, k, episode, played, ends_at_s))
                for k, episode in enumerate(plan.episodes)
            ]
        if not all(end.result() for end in ends):
            self.broken += 1
            return GroupOutcome(None, (_failed(prompt),), ())
        group = SimulatedGroup(
            id=f"g{prompt.index}",
            task=TASK,
            seed=prompt.seed,
            episodes=(),
            verdicts=(),
            start_version=version,
            sampled=played.sampled,
            num_tokens=0 if plan.is_idle else played.num_tokens,
            num_turns=played.num_turns,
        )
        return GroupOutcome(group, (), (), plan.reason)

    def cancelled(self, prompt: Prompt) -> GroupOutcome:
        """The outcome of a group whose `play` was cancelled."""
        del prompt
        return GroupOutcome(None, (), ())

    async def _sibling(
        self, index: int, k: int, plan: EpisodePlan, played: _Played, ends_at_s: float
    ) -> bool:
        """Play an episode until it does not fail; whether there is such an attempt."""
        for attempt in range(self.retries + 1):
            if attempt:
                self.retried += 1
                plan = self.workload.retry(index, k, attempt)
            session, done = f"g{index}-{k}-{attempt}", _Played()
            is_cut = False
            try:
                async with asyncio.timeout_at(None if math.isinf(ends_at_s) else ends_at_s):
                    await self._episode(index, session, plan, done)
            except TimeoutError:
                is_cut = True
                self.cut += 1
            finally:
                self.engines.close_session(session)
            if is_cut or not plan.fails:
                _add(played, done)
                return True
        return False

    async def _episode(self, index: int, session: str, plan: EpisodePlan, done: _Played) -> None:
        """Take the turns of an episode, and add each to `done` when it has ended."""
        await asyncio.sleep(plan.reset_s)
        for turn in plan.turns:
            await self.workers.turn(index)
            await asyncio.sleep(self.request_s)
            prompt = done.num_tokens + turn.world
            sampled = await self.engines.generate(session, prompt, turn.sampled)
            for version, number in sampled.items():
                done.sampled[version] = done.sampled.get(version, 0) + number
            done.num_tokens = prompt + turn.sampled
            done.num_turns += 1
            await asyncio.sleep(turn.then_s)


def _add(played: _Played, done: _Played) -> None:
    for version, number in done.sampled.items():
        played.sampled[version] = played.sampled.get(version, 0) + number
    played.num_tokens += done.num_tokens
    played.num_turns += done.num_turns


def _failed(prompt: Prompt) -> Episode:
    failure = Failure("episode", "simulated", "the episode fails in every attempt")
    name = f"g{prompt.index}-0"
    return Episode(name, "simulated", TASK, prompt.seed, Limits(), (), (), Ending.FAILED, failure)
