"""Over-sampling: more prompts than a batch has groups, of which it takes those that end first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from agentrl.algorithms.filters import BufferFilter, chosen_ids
from agentrl.data import Prompt
from agentrl.errors import StageError, UserError, stage
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.producer import PlayGroup, Producer
from agentrl.types import Group

OVER_SAMPLED: Final = "over_sampled"
"""Why a group is dropped that was not among the first of a batch."""
NOT_CHOSEN: Final = "not_chosen"
"""Why a group is dropped that the buffer filter did not choose."""


class OverSampling(NamedTuple):
    """How a batch is over-sampled.

    size: prompts that start at a time (count). cancelled: the outcome of a group whose playing was cancelled.
    choose: the buffer filter; None = the first groups to end.
    """

    size: int
    cancelled: Callable[[Prompt], GroupOutcome]
    choose: BufferFilter | None = None


class OverSamplingProducer(Producer):
    """Starts `size` prompts at a time, and again where those in flight cannot fill the batch.

    A batch takes the first `batch_size` groups to end that the dynamic sampling filter keeps. The others are
    dropped as `over_sampled`, complete or not: the next version of the weights is served from then on, and a
    group of an older one would be off-policy. Which groups are first depends on the speed of engines and
    tools. A buffer filter waits for all prompts in flight and chooses among their groups; that choice depends
    on the groups only.

    Either way a batch is in the order of start, and nothing is in flight between two batches.

    consumes: prompts. waits for: the next group to end. unblocked by: its end. on shutdown: close() cancels
    what is in flight.

    Raises (from take):
        WorldBrokenError: `max_broken` groups in a row could not be played.
        UserError: `max_num_gen_batches` times `size` groups were dropped for one batch; the buffer filter
        failed.
    """

    def __init__(
        self,
        next_prompt: Callable[[], Prompt],
        play_group: PlayGroup,
        over_sampling: OverSampling,
        *,
        batch_size: int,
        max_broken: int = 3,
        max_num_gen_batches: int = 10,
    ) -> None:
        super().__init__(next_prompt, play_group, batch_size=batch_size, max_broken=max_broken)
        self._size, self._cancelled, self._choose = over_sampling
        self._max_played = max_num_gen_batches * self._size

    async def take(self) -> list[GroupOutcome]:
        """The next batch: `batch_size` kept groups, and all others that were started for it."""
        self._num_dropped = 0
        while not self._is_complete():
            if self._num_kept + len(self._in_flight) < self._batch_size:
                self._start_prompts()
            ended, _ = await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(ended, key=lambda task: self._in_flight[task].index):
                self._add(task)
        taken = await self._chosen()
        await self._cancel()
        outcomes, self._untaken = dict(sorted(self._untaken.items())), {}
        reason = OVER_SAMPLED if self._choose is None else NOT_CHOSEN
        return [
            replace(outcome, reason=reason) if outcome.kept is not None and ordinal not in taken else outcome
            for ordinal, outcome in outcomes.items()
        ]

    def _is_complete(self) -> bool:
        is_full = self._num_kept >= self._batch_size
        return is_full if self._choose is None else is_full and not self._in_flight

    def _start_prompts(self) -> None:
        if self._num_dropped + self._size > self._max_played:
            raise UserError(self._no_signal())
        for _ in range(self._size):
            self._start()

    def _add(self, task: asyncio.Task[GroupOutcome]) -> None:
        outcome = task.result()
        self._untaken[self._in_flight.pop(task).index] = outcome
        self._num_dropped += bool(outcome.reason)
        self._count_broken(outcome)

    async def _chosen(self) -> set[int]:
        """The ordinals of the groups of the batch."""
        kept = {ordinal: outcome.kept for ordinal, outcome in self._untaken.items()}
        groups = {ordinal: group for ordinal, group in kept.items() if group is not None}
        if self._choose is None:
            # In the order of their end.
            return set(list(groups)[: self._batch_size])
        ids = await self._chosen_ids(self._choose, [groups[ordinal] for ordinal in sorted(groups)])
        return {ordinal for ordinal, group in groups.items() if group.id in ids}

    async def _chosen_ids(self, choose: BufferFilter, groups: list[Group]) -> frozenset[str]:
        try:
            async with stage("filter", None):
                return chosen_ids(choose, groups, self._batch_size)
        except StageError as error:
            raise UserError(f"the buffer filter failed ({error.detail}); mend it.") from error

    async def _cancel(self) -> None:
        """Cancel what is in flight, and wait until it has cleaned up."""
        if not self._in_flight:
            return
        for task in self._in_flight:
            task.cancel()
        await asyncio.wait(self._in_flight)
        # All or none: where one of them raises, close() returns those that ended.
        self._untaken |= {
            prompt.index: self._cut(prompt) if task.cancelled() else task.result()
            for task, prompt in self._in_flight.items()
        }
        self._in_flight.clear()

    def _cut(self, prompt: Prompt) -> GroupOutcome:
        return replace(self._cancelled(prompt), reason=OVER_SAMPLED)

    async def _played(self, prompt: Prompt) -> GroupOutcome:
        # Groups that are dropped are replaced by the prompts that start next.
        return await self._play_group(prompt, version=self._version)
