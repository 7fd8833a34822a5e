"""When groups start and which of them make a batch: the difference between synchronous and asynchronous."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from agentrl.data import Prompt
from agentrl.errors import AgentRLError, UserError, WorldBrokenError
from agentrl.rollout.group import GroupInProgress, GroupOutcome
from agentrl.rollout.occupancy import Blocker, Occupancy
from agentrl.rollout.player import PlayGroup
from agentrl.rollout.saved import SavedGroups
from agentrl.rollout.staleness import STALE, GroupPlaces, StalenessPolicy, Straggler, Window


# Groups that could not be played: how many in a row end a run.
class BrokenGroups:
    """Counts broken groups in a row, in the order of their start, since those that fail at once end first.

    max_in_a_row: so many end the run (count).
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row, self._in_a_row = max_in_a_row, 0
        # In the order of their start, from the first one that is in flight: None while they are.
        self._unsettled: dict[int, GroupOutcome | None] = {}

    @property
    def num_unsettled(self) -> int:
        """Broken groups that have ended before a group that started earlier (count)."""
        return sum(outcome is not None and _is_broken(outcome) for outcome in self._unsettled.values())

    def start(self, ordinal: int) -> None:
        """A group starts."""
        self._unsettled[ordinal] = None

    def end(self, ordinal: int, outcome: GroupOutcome) -> None:
        """A group ends.

        Raises:
            WorldBrokenError: it is the last of `max_in_a_row` broken ones.
        """
        self._unsettled[ordinal] = outcome
        while self._unsettled:
            first, settled = next(iter(self._unsettled.items()))
            if settled is None:
                return
            del self._unsettled[first]
            self._count(settled)

    def _count(self, outcome: GroupOutcome) -> None:
        if outcome.group is not None:
            self._in_a_row = 0
        if not _is_broken(outcome):
            return
        self._in_a_row += 1
        if self._in_a_row >= self._max_in_a_row:
            episode = outcome.failed[-1]
            failure = episode.failure
            cause = f"{failure.stage} failed: {failure.detail}" if failure else str(episode.ending)
            raise WorldBrokenError(
                f"{episode.env_id}: {self._in_a_row} groups in a row could not be played "
                f"(last: {cause}); mend the environment, `agentrl eval` with it plays single episodes."
            )


def _is_broken(outcome: GroupOutcome) -> bool:
    return outcome.group is None and not outcome.reason


_STOP_S = 10.0
"""How long the groups in flight may take to stop: schedulers kill a job half a minute after its SIGTERM."""


class Rollouts(Protocol):
    """The batches of a run, in their order: played by a `Producer`, or read from a journal."""

    @property
    def version(self) -> int:
        """The policy version that is served."""

    @property
    def pending(self) -> Sequence[int]:
        """The ordinals of groups that were started and that no `take` has returned, in their order."""

    async def take(self) -> list[GroupOutcome]:
        """The next batch: its kept groups, and the broken and dropped ones between them."""

    def advance(self, num_done: int, *, version: int, is_published: bool = True) -> None:
        """Record that `num_done` batches are done and the policy has this version.

        is_published: the weights of all batches that are done went out.
        """

    def drained(self) -> AbstractAsyncContextManager[None]:
        """A block in which nothing is in flight and nothing starts."""

    async def stop(self) -> Mapping[int, GroupInProgress]:
        """Start nothing more, and stop the groups in flight that can go on later, by ordinal."""

    async def close(self) -> list[GroupOutcome]:
        """Free everything; returns the groups that had ended and that no `take` has returned."""


def _no_outcome(prompt: Prompt) -> GroupOutcome:
    del prompt
    return GroupOutcome(None, (), ())


class EarlyEnd(NamedTuple):
    """How groups in flight end early.

    cancelled: the outcome of a group whose playing was cancelled. reason: why it was. stop: stops all of
    them, so that they can go on later; None = they cannot.
    """

    cancelled: Callable[[Prompt], GroupOutcome] = _no_outcome
    reason: str = STALE
    stop: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """How many groups are played, and when that is given up (counts).

    batch_size: groups of a batch. num_batches: until the run ends; no group starts that none of them needs.
    None = any number. async_buffer_size: complete groups that may wait before no further group starts.
    max_broken: groups in a row that cannot be played. max_num_gen_batches: batches that are played for one
    batch of groups which the filter keeps.
    """

    batch_size: int
    num_batches: int | None = None
    async_buffer_size: int | None = None
    max_broken: int = 3
    max_num_gen_batches: int = 10


class Producer:
    """Keeps groups in flight, and makes batches of those that are complete.

    Synchronous (`policy.is_on_policy`): the groups of a batch start in `take`, all of them are waited for,
    and nothing is in flight between two batches. Which prompts a batch takes depends on the groups, and not
    on which of them is faster.

    Asynchronous: a group starts as soon as it has a place, also while batches are trained. Which groups make
    a batch is the policy's choice among those that are complete.

    A group that the filter drops gives its place back as soon as it has ended, a broken one when all groups
    before it have ended.

    consumes: prompts. waits for: groups. unblocked by: a group's end; advance() frees the places of trained
    groups. on shutdown: close() cancels what is in flight.

    policy: None = synchronous. early: how what is in flight ends early.

    Raises (from take):
        WorldBrokenError: `max_broken` groups in a row could not be filled.
        UserError: `max_num_gen_batches` batches were played, and the filter did not keep one.
    """

    def __init__(
        self,
        next_prompt: Callable[[], Prompt],
        play_group: PlayGroup,
        settings: ProducerSettings,
        policy: StalenessPolicy | None = None,
        early: EarlyEnd | None = None,
    ) -> None:
        self._next_prompt = next_prompt
        self._play_group, self._early = play_group, early or EarlyEnd()
        self._settings = settings
        self.policy: StalenessPolicy = policy or Window(GroupPlaces(0, settings.batch_size))
        self._num_left = settings.num_batches
        self._max_played = settings.max_num_gen_batches * settings.batch_size
        self._version = 0
        self._num_done = 0
        self._num_dropped = 0
        self._broken = BrokenGroups(settings.max_broken)
        self._num_unpublished = 0
        self._is_taking = self._is_closed = self._is_draining = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._in_flight: dict[asyncio.Task[GroupOutcome], Prompt] = {}
        # By ordinal, until it is taken: when a group started; how many later ones were taken before it.
        self._start_versions: dict[int, int] = {}
        self._bypassed: dict[int, int] = {}
        # Ended, in the order of their end.
        self._untaken: dict[int, GroupOutcome] = {}
        # Those of the run before, until their prompts come; and those of this one.
        self._saved = SavedGroups()
        self._stopped: dict[int, GroupInProgress] = {}

    @property
    def version(self) -> int:
        """The policy version that is being served."""
        return self._version

    @property
    def pending(self) -> list[int]:
        """The ordinals of groups that were started and that no `take` has returned, in their order."""
        return sorted(self._start_versions)

    @property
    def occupancy(self) -> Occupancy:
        """The places at this moment."""
        return Occupancy(
            self.policy.capacity,
            len(self._in_flight),
            self._num_waiting,
            self._blocker(),
            self._num_unpublished,
        )

    def resume(self, num_done: int, *, version: int, saved: SavedGroups | None = None) -> None:
        """Go on where so many batches are done. Before the first `take`.

        saved: groups that take the places of those that their prompts would start.
        """
        self._num_done, self._version = num_done, version
        self._saved = saved or self._saved

    def advance(self, num_done: int, *, version: int, is_published: bool = True) -> None:
        """Record that `num_done` batches are done and `version` is served; older numbers have no effect.

        A batch without a training step is done, too, and leaves the version as it was. is_published: the
        weights of all batches that are done went out, so that their groups give their places back.
        """
        self._num_done = max(self._num_done, num_done)
        self._version = max(self._version, version)
        if is_published:
            self._num_unpublished = 0
        self._admit()

    async def take(self) -> list[GroupOutcome]:
        """The next batch: `batch_size` kept groups, and the broken and dropped ones that have ended.

        Raises:
            WorldBrokenError: `max_broken` groups in a row could not be played.
            UserError: `max_num_gen_batches` batches were played, and the filter did not keep one.
        """
        return self._taken(await self._filled())

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """A block in which nothing is in flight and no group starts: no trajectory spans an update in it."""
        self._is_draining = True
        try:
            while self._in_flight:
                self._changed.clear()
                await self._changed.wait()
            yield
        finally:
            self._is_draining = False
            self._admit()

    async def stop(self) -> Mapping[int, GroupInProgress]:
        """Start nothing more, and stop the groups in flight; those that take too long are left to `close`.

        Returns the groups that can go on later, by ordinal.
        """
        self._is_closed = True
        if self._early.stop is not None and self._in_flight:
            with suppress(TimeoutError, AgentRLError):
                async with asyncio.timeout(_STOP_S):
                    await self._early.stop()
                    while self._in_flight:
                        self._changed.clear()
                        await self._changed.wait()
        return self._stopped

    async def close(self) -> list[GroupOutcome]:
        """Cancel every group in flight and wait until each has cleaned up.

        Returns the groups that had ended and that no `take` has returned.
        """
        self._is_closed = True
        in_flight = list(self._in_flight)
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)
        # A task that ends calls `_on_end` in the next iteration of the loop.
        while self._in_flight:
            await asyncio.sleep(0)
        leftover = [self._untaken[ordinal] for ordinal in sorted(self._untaken)]
        self._untaken = {}
        return leftover

    async def _filled(self) -> list[int]:
        """Wait for the groups of the next batch; their ordinals."""
        self._is_taking = True
        try:
            while (chosen := self._chosen()) is None:
                if self._is_closed:
                    raise asyncio.CancelledError
                if not self._in_flight:
                    raise UserError(self._no_signal())
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._is_taking = False
        return chosen

    @property
    def _num_kept(self) -> int:
        return sum(outcome.kept is not None for outcome in self._untaken.values())

    @property
    def _num_waiting(self) -> int:
        """Complete groups, and broken ones until all groups before them have ended (count)."""
        return self._num_kept + self._broken.num_unsettled

    def _blocker(self) -> Blocker:
        """Why no further group starts now."""
        settings, num_kept = self._settings, self._num_kept
        if self.policy.is_on_policy and not self._is_taking:
            return "batch"
        if self._is_draining:
            return "update"
        num_left = self._num_left
        is_enough = num_left is not None and num_kept + len(self._in_flight) >= num_left * settings.batch_size
        if self._is_closed or is_enough:
            return "end"
        if len(self._in_flight) + self._num_waiting + self._num_unpublished >= self.policy.capacity:
            is_window = num_kept >= settings.batch_size and self._selected() is None
            return "window" if is_window else "capacity"
        if settings.async_buffer_size is not None and num_kept >= settings.async_buffer_size:
            return "buffer"
        return "filter" if self._num_dropped + settings.batch_size > self._max_played else ""

    def _selected(self) -> list[int] | None:
        """The ordinals of the next batch among the groups that are complete; None = it has to wait."""
        complete = [ordinal for ordinal, outcome in self._untaken.items() if outcome.kept is not None]
        oldest = min((prompt.index for prompt in self._in_flight.values()), default=None)
        straggler = None if oldest is None else Straggler(oldest, self._bypassed[oldest])
        return self.policy.select(complete, straggler)

    def _chosen(self) -> list[int] | None:
        """As `_selected`, after what is too old was dropped and others have started."""
        self._raise_failure()
        self._evict()
        self._admit()
        return self._selected()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _taken(self, chosen: Sequence[int]) -> list[GroupOutcome]:
        """The outcomes of a batch, in the order of start."""
        batch = {ordinal: self._untaken.pop(ordinal) for ordinal in chosen}
        for prompt in self._in_flight.values():
            self._bypassed[prompt.index] += sum(ordinal > prompt.index for ordinal in chosen)
        for ordinal in [o for o, outcome in self._untaken.items() if outcome.kept is None]:
            batch[ordinal] = self._untaken.pop(ordinal)
        for ordinal in batch:
            del self._start_versions[ordinal], self._bypassed[ordinal]
        self._num_unpublished += len(chosen)
        self._num_dropped = 0
        if self._num_left is not None:
            self._num_left -= 1
        return [batch[ordinal] for ordinal in sorted(batch)]

    def _evict(self) -> None:
        """Drop the groups that the policy finds too old."""
        for ordinal in self.policy.evict(self._oldest_versions(), self._version):
            if ordinal in self._untaken:
                self._untaken[ordinal] = replace(self._untaken[ordinal], reason=STALE)
                continue
            for task, prompt in self._in_flight.items():
                if prompt.index == ordinal:
                    task.cancel()

    def _oldest_versions(self) -> dict[int, int]:
        kept = [prompt.index for prompt in self._in_flight.values()]
        kept += [ordinal for ordinal, outcome in self._untaken.items() if outcome.kept is not None]
        return {ordinal: self._start_versions[ordinal] for ordinal in kept}

    def _admit(self) -> None:
        while not self._blocker():
            self._start()

    def _start(self) -> None:
        prompt = self._next_prompt()
        ended, begun = self._saved.take(prompt)
        self._start_versions[prompt.index], self._bypassed[prompt.index] = self._version, 0
        self._broken.start(prompt.index)
        if ended is not None:
            if ended.group is not None:
                self._start_versions[prompt.index] = ended.group.start_version
            self._end(prompt, ended)
            return
        if begun is not None:
            self._start_versions[prompt.index] = begun.start_version
        version = self._start_versions[prompt.index]
        task = asyncio.create_task(self._play_group(prompt, version=version, begun=begun))
        self._in_flight[task] = prompt
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[GroupOutcome]) -> None:
        prompt = self._in_flight.pop(task)
        self._changed.set()
        if task.cancelled():
            if self._is_closed:
                return
            outcome = replace(self._early.cancelled(prompt), reason=self._early.reason)
        elif (error := task.exception()) is not None:
            # The first failure ends the run; `close` reports no further ones.
            self._failure = self._failure or error
            return
        elif (begun := task.result().in_progress) is not None:
            self._stopped[prompt.index] = begun
            return
        else:
            outcome = task.result().ended(self._version)
        try:
            self._end(prompt, outcome)
            self._admit()
        except UserError as error:
            self._failure = self._failure or error

    def _end(self, prompt: Prompt, outcome: GroupOutcome) -> None:
        """Keep the outcome of a group for a batch."""
        self._untaken[prompt.index] = outcome
        self._num_dropped += outcome.group is not None and bool(outcome.reason)
        self._changed.set()
        self._broken.end(prompt.index, outcome)

    def _no_signal(self) -> str:
        reasons = Counter(outcome.reason for outcome in self._untaken.values() if outcome.reason)
        counts = ", ".join(f"{reason}: {number}" for reason, number in sorted(reasons.items()))
        return (
            f"{len(self._untaken)} groups were played for a batch of {self._settings.batch_size}, and the "
            f"filter kept {self._num_kept} ({counts}); take tasks that are neither too hard nor too easy, "
            "raise n_samples_per_prompt, or raise max_num_gen_batches."
        )
