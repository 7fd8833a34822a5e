"""A model of the trainer: seconds for tokens, steps and new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from agentrl.rollout.group import GroupOutcome
from agentrl.types.seams import PublishReport
from agentrl_simulate.config import SimulateSection
from agentrl_simulate.engine import SimulatedEngines
from agentrl_simulate.player import SimulatedGroup
from agentrl_simulate.virtual_time import now_s

_SLICES = 50
"""Parts of a call of the trainer, each as slow as the engines make it when it begins (count)."""


@dataclass(slots=True)
class SimulatedTraining:
    """The training of every batch of a simulation; see `BatchTraining`.

    num_steps: optimizer steps of a batch, all passes over it included. num_passes: over its tokens (counts).
    busy_s: the time of its calls so far (seconds). groups: of the batch. num_trained: groups that were
    trained; num_dropped: those that were dropped, by reason, "" = broken (counts).
    """

    section: SimulateSection
    engines: SimulatedEngines
    num_steps: int
    num_passes: int = 1
    has_new_weights: bool = False
    busy_s: float = 0.0
    groups: Sequence[SimulatedGroup] = ()
    num_trained: int = 0
    num_dropped: dict[str, int] = field(default_factory=dict)

    async def receive(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Account for the batch."""
        self.groups = [each.kept for each in outcomes if isinstance(each.kept, SimulatedGroup)]
        self.num_trained += len(self.groups)
        for outcome in outcomes:
            if outcome.kept is None:
                self.num_dropped[outcome.reason] = self.num_dropped.get(outcome.reason, 0) + 1

    async def score(self) -> None:
        """The pass before the first update, where there is one."""
        speed = self.section.score_tok_per_s
        if speed is not None:
            await self._work(self._num_tokens / speed / self.section.trainer_speedup)

    async def update(self) -> None:
        """All optimizer steps; a batch without a gradient takes none."""
        if not self._num_tokens:
            return
        section = self.section
        tokens_s = self._num_tokens * self.num_passes / section.train_tok_per_s
        await self._work(tokens_s / section.trainer_speedup + self.num_steps * section.optimizer_step_s)
        self.has_new_weights = True

    async def publish(self, version: int) -> PublishReport:
        """Send new weights to all engines, which stand still at its end."""
        section = self.section
        with self._working():
            await asyncio.sleep(max(section.publish_s - section.standstill_s, 0.0))
            for engine in self.engines.engines:
                engine.install(version, section.standstill_s)
            await asyncio.sleep(min(section.standstill_s, section.publish_s))
        self.has_new_weights = False
        return PublishReport(version, 0, 0.0)

    @property
    def _num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)

    async def _work(self, seconds: float) -> None:
        """Compute for so many seconds, and longer where engines need the same processors meanwhile."""
        slowdown = self.section.train_slowdown
        with self._working():
            if not slowdown:
                await asyncio.sleep(seconds)
                return
            for _ in range(_SLICES):
                factor = 1.0 + slowdown if self.engines.is_busy else 1.0
                await asyncio.sleep(seconds / _SLICES * factor)

    @contextmanager
    def _working(self) -> Iterator[None]:
        began_s = now_s()
        self._slow_engines(1.0 + self.section.play_slowdown)
        try:
            yield
        finally:
            self._slow_engines(1.0)
            self.busy_s += now_s() - began_s

    def _slow_engines(self, factor: float) -> None:
        if self.section.play_slowdown:
            for engine in self.engines.engines:
                engine.slow_down(factor)


@dataclass(frozen=True, slots=True)
class SharedDevices:
    """The turns of engines and trainer on the same GPUs; see `DeviceTurns`.

    change_s: time of a change from one to the other (seconds).
    """

    engines: SimulatedEngines
    change_s: float
    offload_rollout: bool = True

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer's turn: no request gets a token."""
        for engine in self.engines.engines:
            engine.pause()
        await asyncio.sleep(self.change_s)
        yield

    @asynccontextmanager
    async def publishing(self, *, sends: bool) -> AsyncIterator[None]:
        """The engines' turn, after the weights."""
        del sends
        await asyncio.sleep(self.change_s)
        yield
        for engine in self.engines.engines:
            engine.resume()
