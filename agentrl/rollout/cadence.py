"""The order of an iteration, whoever trains; after which of them weights are published, the reference moves.

    take -> score -> update -> publish -> the next groups may start

`Loop` trains real batches in this order, `agentrl_simulate` models of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.producer import Rollouts
from agentrl.runtime.activity import TAKE, working
from agentrl.types.seams import PublishReport


class Publishing(NamedTuple):
    """When new weights are published.

    interval: iterations for each version (count). last_step: that of the last iteration, after which they
    always are; None = unknown. drains: no episode may be in flight then.
    """

    interval: int = 1
    last_step: int | None = None
    drains: bool = False

    @classmethod
    def of(cls, config: RolloutConfig) -> Publishing:
        """As configured."""
        drains = config.is_async and not config.spans_updates
        return cls(config.update_weights_interval, config.num_rollout - 1, drains)

    def is_due(self, step: int) -> bool:
        """Whether weights go out after this iteration, where there are new ones."""
        return (step + 1) % self.interval == 0 or step == self.last_step


class MovingReference(NamedTuple):
    """When the reference moves towards the policy. interval: iterations from one move to the next (count).
    share: that of the policy in it then."""

    interval: int
    share: float

    def is_due(self, step: int) -> bool:
        """Whether it moves in this iteration."""
        return (step + 1) % self.interval == 0


def moving_reference(config: AlgorithmConfig) -> MovingReference | None:
    """The configured one."""
    interval = config.ref_update_interval
    return None if interval is None else MovingReference(interval, config.ref_mixup_alpha)


class BatchTraining(Protocol):
    """What an iteration does with its batch, in the order of the methods."""

    @property
    def has_new_weights(self) -> bool:
        """Whether weights were updated that were not published yet; they may be of an earlier batch."""

    async def receive(self, outcomes: Sequence[GroupOutcome]) -> None:
        """The batch was taken; nothing else has run since."""

    async def score(self) -> None:
        """All that is computed of the whole batch before its first update."""

    async def update(self) -> None:
        """All optimizer steps of the batch."""

    async def publish(self, version: int) -> PublishReport:
        """Send the new weights to whatever serves the policy, as this version."""


class Times(NamedTuple):
    """When the phases of an iteration ended, by the clock of its cadence (seconds)."""

    started: float
    played: float
    scored: float
    updated: float
    ended: float


class DeviceTurns(Protocol):
    """Who has the devices in an iteration, where engine and trainer share them."""

    @property
    def offload_rollout(self) -> bool:
        """Whether the engine has no memory in the trainer's turn."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """The trainer's turn; the engine's begins with `publishing`."""

    def publishing(self, *, sends: bool) -> AbstractAsyncContextManager[None]:
        """The engine's turn, after a block in which new weights are published. sends: whether there are
        some."""


class OwnDevices:
    """Engine and trainer have devices of their own, and no turns."""

    offload_rollout = False

    def training(self) -> AbstractAsyncContextManager[None]:
        """A block that changes nothing."""
        return nullcontext()

    def publishing(self, *, sends: bool) -> AbstractAsyncContextManager[None]:
        """A block that changes nothing."""
        del sends
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Cadence:
    """The order of an iteration, and when its weights are published.

    consumes: batches of `producer`. waits for: a batch, then the calls of its training. unblocked by: the
    ends of groups, and of these calls. at its end: nothing of it goes on; its owner closes the producer.

    turns: of engine and trainer, where they share devices.
    """

    producer: Rollouts
    publishing: Publishing = field(default_factory=Publishing)
    turns: DeviceTurns = field(default_factory=OwnDevices)
    clock: Callable[[], float] = time.perf_counter

    async def iterate(self, step: int, training: BatchTraining) -> tuple[Times, PublishReport | None]:
        """Take the batch of `step`, train on it, publish what is due, and free the places of its groups.

        Returns the times of the phases, and what was published; None = nothing was.
        """
        async with AsyncExitStack() as stack:
            phases = Phases(self, training, stack)
            await phases.take()
            await phases.score()
            await phases.update()
            published = await phases.end(step, publishes=self.publishing.is_due(step))
        return phases.times, published


class Phases:
    """An iteration, phase by phase, in the order of the methods; only `take` and `end` are in each.

    stack: its end ends what a phase has begun, where the iteration stops before `end`.
    """

    def __init__(self, cadence: Cadence, training: BatchTraining, stack: AsyncExitStack) -> None:
        self._cadence, self._training, self._stack = cadence, training, stack
        # Entered in the trainer's turn, left before the weights are published.
        self._turn: AsyncExitStack | None = None
        self._ends = [cadence.clock()] * len(Times._fields)

    @property
    def times(self) -> Times:
        """When each phase ended; one that was left out took no time."""
        return Times(*self._ends)

    async def take(self) -> None:
        """Take the batch."""
        with working(TAKE):
            outcomes = await self._cadence.producer.take()
        self._ended(1)
        await self._training.receive(outcomes)

    async def score(self) -> None:
        """Compute what is computed of the whole batch before any of its updates: the proximal policy is that
        of all its steps."""
        await self._begin_turn()
        await self._training.score()
        self._ended(2)

    async def update(self) -> None:
        """Take the optimizer steps."""
        await self._training.update()
        self._ended(3)

    async def end(self, step: int, *, publishes: bool) -> PublishReport | None:
        """Publish new weights, if there are some; the next groups may start. Returns what was published.

        publishes: whether weights go out after this iteration, where there are new ones.
        """
        producer = self._cadence.producer
        published = await self._publish(sends=publishes and self._training.has_new_weights)
        # Where an update may meet no episode in flight: until now.
        await self._stack.aclose()
        version = published.version if published else producer.version
        producer.advance(step + 1, version=version, is_published=publishes)
        self._ended(4)
        return published

    async def _begin_turn(self) -> None:
        if self._turn is None:
            # Episodes end only while the engine has its memory.
            await self._stack.enter_async_context(self._drained(self._cadence.turns.offload_rollout))
            self._turn = await self._stack.enter_async_context(AsyncExitStack())
            await self._turn.enter_async_context(self._cadence.turns.training())

    async def _publish(self, *, sends: bool) -> PublishReport | None:
        if sends:
            await self._begin_turn()
        if self._turn is None:
            return None
        await self._turn.aclose()
        cadence = self._cadence
        async with cadence.turns.publishing(sends=sends):
            if not sends:
                return None
            async with self._drained(not cadence.turns.offload_rollout):
                return await self._training.publish(cadence.producer.version + 1)

    def _drained(self, here: bool) -> AbstractAsyncContextManager[None]:
        """Where an update may meet no episode in flight, and this is the place: a block without any."""
        cadence = self._cadence
        return cadence.producer.drained() if here and cadence.publishing.drains else nullcontext()

    def _ended(self, phase: int) -> None:
        self._ends[phase:] = [self._cadence.clock()] * len(self._ends[phase:])
