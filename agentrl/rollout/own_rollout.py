"""Batches that a rollout function plays: it decides which prompts are played when, and which groups count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from agentrl.algorithms.contract import small_groups
from agentrl.algorithms.filters import chosen_ids
from agentrl.data import Prompt
from agentrl.errors import AgentRLError, StageError, UserError
from agentrl.rollout.group import GroupInProgress, GroupOutcome
from agentrl.rollout.over_sampling import NOT_CHOSEN
from agentrl.rollout.player import PlayGroup
from agentrl.rollout.producer import EarlyEnd, Producer, ProducerSettings
from agentrl.runtime.event_loop import blocking, run_coroutine
from agentrl.runtime.stage import stage
from agentrl.types import Group, Task


class RolloutInPlay:
    """One batch, which a rollout function plays.

    step: the iteration, from 1 on. size: groups that the function returns (count).
    """

    def __init__(self, producer: FunctionProducer, step: int, size: int) -> None:
        self._producer, self.step, self.size = producer, step, size
        self._is_over = False

    def end(self) -> None:
        """The function has ended: what it has left running draws and plays nothing more."""
        self._is_over = True

    def prompt(self) -> Prompt:
        """Draw the next prompt of the run. One that is not played is journalled as dropped.

        Raises:
            UserError: the function has returned, and this batch is over.
        """
        self._check_open()
        return self._producer.draw()

    async def play(self, prompt: Prompt | None = None) -> Group | None:
        """Play the group of a prompt that was drawn; without one, of the next prompt.

        Calls may wait side by side, as in `asyncio.gather`. None = the group could not be played, or the
        dynamic sampling filter has dropped it.

        Raises:
            UserError: the prompt was played before, or is none of this batch; or the batch is over.
            AgentRLError: engine or environment have failed, and the run ends.
        """
        self._check_open()
        group = await self._producer.play(self.prompt() if prompt is None else prompt)
        self._check_open()
        return group

    def _check_open(self) -> None:
        if self._is_over:
            raise UserError(
                "the rollout function has returned, and its batch is over; wait for all it plays."
            )


RolloutFunction: TypeAlias = Callable[[RolloutInPlay], Awaitable[Sequence[Group]]]
"""Plays a batch, and returns `size` of the groups that it has played."""


class FunctionProducer(Producer):
    """Batches that a function plays, one after another; nothing is in flight between two.

    What it has played and does not return is dropped as `not_chosen`, as is what is still in play when it
    returns. A batch is in the order in which its prompts were drawn.

    consumes: prompts, as the function draws them. waits for: the function. unblocked by: the ends of the
    groups that it waits for. on shutdown: close() cancels what is in flight.

    step: iterations that are done (count).

    Raises (from take):
        UserError: the function failed, or returned other groups than `batch_size` of those that it played.
        WorldBrokenError: `max_broken` groups in a row could not be played.
    """

    def __init__(
        self,
        next_prompt: Callable[[], Prompt],
        play_group: PlayGroup,
        settings: ProducerSettings,
        function: RolloutFunction,
        early: EarlyEnd,
        step: int = 0,
    ) -> None:
        super().__init__(next_prompt, play_group, settings, early=EarlyEnd(early.cancelled, NOT_CHOSEN))
        self._function, self._cancelled, self._step = function, early.cancelled, step
        # Of the batch in play: prompts that were drawn and not played, the ends of those that are played, the
        # first error of one of them.
        self._drawn: dict[int, Prompt] = {}
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._failure: AgentRLError | None = None

    def draw(self) -> Prompt:
        """The next prompt, which is this batch's from then on."""
        prompt = self._next_prompt()
        self._buffer.start(prompt.index, self._version)
        self._drawn[prompt.index] = prompt
        return prompt

    async def play(self, prompt: Prompt) -> Group | None:
        """Play the group of a prompt; see `RolloutInPlay.play`."""
        if self._drawn.get(prompt.index) is not prompt:
            raise UserError(
                f"prompt {prompt.index} was played before, or was not drawn for this batch; "
                "draw another with prompt()."
            )
        del self._drawn[prompt.index]
        ended = self._ends[prompt.index] = asyncio.get_running_loop().create_future()
        self._in_flight.start(prompt, self._version, None)
        await ended
        self._raise_failure()
        if self._buffer.num_dropped >= self._max_played:
            raise UserError(self._buffer.no_signal(self._settings.batch_size))
        return self._buffer.kept.get(prompt.index)

    async def take(self) -> list[GroupOutcome]:
        """The batch that the function plays, and all others that were started for it."""
        self._step += 1
        in_play = RolloutInPlay(self, self._step, self._settings.batch_size)
        self._is_taking = True
        try:
            async with stage("rollout", None):
                groups = await self._function(in_play)
                ids = chosen_ids(lambda *_: groups, [*self._buffer.kept.values()], in_play.size)
        except StageError as error:
            self._raise_failure()
            raise UserError(f"the rollout function failed ({error.detail}); mend it.") from error
        finally:
            self._is_taking = False
            in_play.end()
        await self._in_flight.cancel_all()
        self._raise_failure()
        for ordinal, prompt in self._drawn.items():
            self._buffer.end(ordinal, replace(self._cancelled(prompt), reason=NOT_CHOSEN))
        self._drawn.clear()
        self._ends.clear()
        taken = sorted(ordinal for ordinal, group in self._buffer.kept.items() if group.id in ids)
        for ordinal in self._buffer.kept:
            if ordinal not in taken:
                self._buffer.drop(ordinal, NOT_CHOSEN)
        return self._taken(taken)

    def _admit(self) -> None:
        """Nothing: the function starts groups."""

    def _on_end(self, prompt: Prompt, outcome: GroupOutcome | None) -> None:
        try:
            super()._on_end(prompt, outcome)
        finally:
            if (ended := self._ends.get(prompt.index)) is not None and not ended.done():
                ended.set_result(None)

    def _raise_failure(self) -> None:
        """Raise the first error of a group, each time: a function that catches it does not go on."""
        if self._failure is None:
            try:
                self._in_flight.raise_failure()
            except AgentRLError as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure


def check_rollout(function: RolloutFunction) -> None:
    """Check that a rollout function satisfies its contract: use it in the tests of your own.

    It plays a batch of two groups, then one of four, among groups of different sizes, with equal and unequal
    rewards, each of which ends at once. It must return as many of those that it has played, each once.

    Raises:
        ValueError: the contract is violated; the message is one sentence.
    """
    try:
        blocking(lambda: run_coroutine(_tried(function, (2, 4))))
    except UserError as error:
        raise ValueError(str(error).removesuffix(".")) from None


async def _tried(function: RolloutFunction, sizes: Sequence[int]) -> None:
    groups = small_groups()
    prompts = (Prompt(ordinal, Task.ask(f"p{ordinal}", "?"), ordinal) for ordinal in range(10**6))

    async def play(prompt: Prompt, *, version: int, begun: GroupInProgress | None = None) -> GroupOutcome:
        del version, begun
        await asyncio.sleep(0)
        group = groups[prompt.index % len(groups)]
        return GroupOutcome(replace(group, id=f"g{prompt.index:06d}"), (), group.episodes)

    def cancelled(prompt: Prompt) -> GroupOutcome:
        del prompt
        return GroupOutcome(None, (), ())

    for size in sizes:
        settings = ProducerSettings(size, max_num_gen_batches=10**6)
        producer = FunctionProducer(partial(next, prompts), play, settings, function, EarlyEnd(cancelled))
        await producer.take()
        await producer.close()
