"""When groups start: the difference between a synchronous and an asynchronous run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Protocol

from agentrl.data import Prompt
from agentrl.errors import UserError, WorldBrokenError
from agentrl.rollout.group import GroupOutcome


class PlayGroup(Protocol):
    """Plays the group of a prompt against the policy that serves `version`."""

    def __call__(self, prompt: Prompt, *, version: int) -> Coroutine[None, None, GroupOutcome]:
        """Start playing."""


class Rollouts(Protocol):
    """The batches of a run, in their order: played by a `Producer`, or read from a journal."""

    @property
    def version(self) -> int:
        """The policy version of the next batch."""

    async def take(self) -> list[GroupOutcome]:
        """The next batch: its kept groups, and the broken and dropped ones between them."""

    def advance(self, num_done: int, *, version: int) -> None:
        """Record that `num_done` batches are done and the policy has this version."""

    async def close(self) -> list[GroupOutcome]:
        """Free everything; returns the groups that had ended and that no `take` has returned."""


class Producer:
    """Keeps groups in flight and returns them in the order in which they were started.

    A group starts only if it could still be consumed within `max_staleness`: while n batches are
    done, batches up to n + max_staleness may have been started. A batch adds at most one version,
    so no group is older than `max_staleness` versions. At 0 the loop is synchronous: no group starts
    before the previous batch is done and its weights, if there are new ones, have been published.

    consumes: prompts. waits for: groups, oldest first. unblocked by: a group's end; advance()
    admits more. on shutdown: close() cancels what is in flight.

    Raises (from take):
        WorldBrokenError: `max_broken` groups in a row could not be filled.
    """

    def __init__(
        self,
        next_prompt: Callable[[], Prompt],
        play_group: PlayGroup,
        *,
        batch_size: int,
        max_staleness: int = 0,
        max_broken: int = 3,
        max_num_gen_batches: int = 10,
    ) -> None:
        self._next_prompt = next_prompt
        self._play_group = play_group
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._max_broken = max_broken
        self._max_played = max_num_gen_batches * batch_size
        self._num_dropped = 0
        self._is_closed = False
        self._version = 0
        self._num_done = 0
        self._num_started = 0
        self._num_broken_in_a_row = 0
        # By ordinal; and in the order of their start.
        self._untaken: dict[int, GroupOutcome] = {}
        self._in_flight: dict[asyncio.Task[GroupOutcome], Prompt] = {}

    @property
    def version(self) -> int:
        """The policy version that is being served."""
        return self._version

    def resume(self, num_done: int, *, version: int) -> None:
        """Go on where so many batches are done, and none is in flight. Before the first `take`."""
        self._num_done, self._version = num_done, version
        self._num_started = num_done * self._batch_size

    def advance(self, num_done: int, *, version: int) -> None:
        """Record that `num_done` batches are done and `version` is served; older numbers have no effect.

        A batch without a training step is done, too, and leaves the version as it was.
        """
        self._num_done = max(self._num_done, num_done)
        self._version = max(self._version, version)

    async def take(self) -> list[GroupOutcome]:
        """The next batch: `batch_size` kept groups, and the broken and dropped ones between them.

        A group that the filter drops is replaced as soon as it has ended. So which prompts a batch takes
        depends on the groups, and not on which of them is faster.

        Raises:
            WorldBrokenError: `max_broken` groups in a row could not be played.
            UserError: `max_num_gen_batches` batches were played, and the filter did not keep one.
        """
        self._num_dropped = 0
        self._admit()
        while self._num_kept < self._batch_size:
            if not self._in_flight:
                raise UserError(self._no_signal())
            oldest = next(iter(self._in_flight))
            outcome = await oldest
            self._untaken[self._in_flight.pop(oldest).index] = outcome
            self._count_broken(outcome)
            if outcome.group is None:
                self._start()
        outcomes, self._untaken = self._untaken, {}
        return list(outcomes.values())

    async def close(self) -> list[GroupOutcome]:
        """Cancel every group in flight and wait until each has cleaned up.

        Returns the groups that had ended and that no `take` has returned.
        """
        self._is_closed = True
        for task in self._in_flight:
            task.cancel()
        ended = await asyncio.gather(*self._in_flight, return_exceptions=True)
        leftover = [*self._untaken.values(), *(o for o in ended if isinstance(o, GroupOutcome))]
        self._in_flight.clear()
        self._untaken = {}
        return leftover

    @property
    def _num_kept(self) -> int:
        return sum(outcome.kept is not None for outcome in self._untaken.values())

    def _admit(self) -> None:
        allowed = (self._num_done + self._max_staleness + 1) * self._batch_size
        while self._num_started < allowed:
            self._num_started += 1
            self._start()

    def _start(self) -> None:
        prompt = self._next_prompt()
        self._in_flight[asyncio.create_task(self._played(prompt))] = prompt

    async def _played(self, prompt: Prompt) -> GroupOutcome:
        outcome = await self._play_group(prompt, version=self._version)
        if outcome.reason and not self._is_closed:
            self._num_dropped += 1
            if self._num_dropped + self._batch_size <= self._max_played:
                self._start()
        return outcome

    def _no_signal(self) -> str:
        reasons = Counter(outcome.reason for outcome in self._untaken.values() if outcome.reason)
        counts = ", ".join(f"{reason}: {number}" for reason, number in sorted(reasons.items()))
        return (
            f"{len(self._untaken)} groups were played for a batch of {self._batch_size}, and the filter kept "
            f"{self._num_kept} ({counts}); take tasks that are neither too hard nor too easy, raise "
            "n_samples_per_prompt, or raise max_num_gen_batches."
        )

    def _count_broken(self, outcome: GroupOutcome) -> None:
        if outcome.group is not None:
            self._num_broken_in_a_row = 0
            return
        self._num_broken_in_a_row += 1
        if self._num_broken_in_a_row >= self._max_broken:
            episode = outcome.failed[-1]
            failure = episode.failure
            cause = f"{failure.stage} failed: {failure.detail}" if failure else str(episode.ending)
            raise WorldBrokenError(
                f"{episode.env_id}: {self._num_broken_in_a_row} groups in a row could not be played "
                f"(last: {cause}); mend the environment, `agentrl eval` with it plays single episodes."
            )
