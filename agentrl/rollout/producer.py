"""When groups start and which of them make a batch: the difference between synchronous and asynchronous."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from agentrl.data import Prompt
from agentrl.errors import AgentRLError, UserError
from agentrl.rollout.group import BrokenGroups, GroupInProgress, GroupOutcome
from agentrl.rollout.occupancy import Blocker, Occupancy
from agentrl.rollout.player import PlayGroup
from agentrl.rollout.saved import SavedGroups
from agentrl.rollout.staleness import STALE, GroupPlaces, StalenessPolicy, Straggler, Window
from agentrl.types import Group

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


class GroupBuffer:
    """Groups from their start until a batch takes them: their ages, and the outcomes of those that ended.

    max_broken: groups in a row that cannot be played, until the run ends (count).
    num_dropped: groups that the filter has dropped since the batch before (count).
    """

    def __init__(self, max_broken: int) -> None:
        self._broken = BrokenGroups(max_broken)
        self.num_dropped = 0
        # By ordinal, until it is taken: when a group started; how many later ones were taken before it.
        self._start_versions: dict[int, int] = {}
        self._bypassed: dict[int, int] = {}
        # In the order of their end.
        self._ended: dict[int, GroupOutcome] = {}

    @property
    def pending(self) -> list[int]:
        """The ordinals of all groups, in their order."""
        return sorted(self._start_versions)

    @property
    def kept(self) -> dict[int, Group]:
        """The complete groups that the filter keeps, by ordinal, in the order of their end."""
        ended = self._ended.items()
        return {ordinal: group for ordinal, outcome in ended if (group := outcome.kept) is not None}

    @property
    def num_waiting(self) -> int:
        """Complete groups, and broken ones until all groups before them have ended (count)."""
        return len(self.kept) + self._broken.num_unsettled

    def start(self, ordinal: int, version: int) -> None:
        """A group starts. version: the oldest that it may have tokens of."""
        self._start_versions[ordinal], self._bypassed[ordinal] = version, 0
        self._broken.start(ordinal)

    def end(self, ordinal: int, outcome: GroupOutcome) -> None:
        """Keep the outcome of a group for a batch.

        Raises:
            WorldBrokenError: it is the last of `max_broken` broken ones.
        """
        self._ended[ordinal] = outcome
        self.num_dropped += outcome.group is not None and bool(outcome.reason)
        self._broken.end(ordinal, outcome)

    def drop(self, ordinal: int, reason: str) -> bool:
        """Drop a group; False = it has not ended yet."""
        if ordinal not in self._ended:
            return False
        self._ended[ordinal] = replace(self._ended[ordinal], reason=reason)
        return True

    def straggler(self, in_flight: Collection[int]) -> Straggler | None:
        """The oldest of the groups in flight; None = there are none."""
        oldest = min(in_flight, default=None)
        return None if oldest is None else Straggler(oldest, self._bypassed[oldest])

    def oldest_versions(self, in_flight: Collection[int]) -> dict[int, int]:
        """Of each group in flight or kept, the oldest version that it may have tokens of."""
        return {ordinal: self._start_versions[ordinal] for ordinal in (*in_flight, *self.kept)}

    def take(self, chosen: Sequence[int], in_flight: Collection[int]) -> list[GroupOutcome]:
        """A batch, and the broken and dropped groups that have ended, in the order of their start."""
        batch = {ordinal: self._ended.pop(ordinal) for ordinal in chosen}
        for running in in_flight:
            self._bypassed[running] += sum(ordinal > running for ordinal in chosen)
        for ordinal in [o for o, outcome in self._ended.items() if outcome.kept is None]:
            batch[ordinal] = self._ended.pop(ordinal)
        for ordinal in batch:
            del self._start_versions[ordinal], self._bypassed[ordinal]
        self.num_dropped = 0
        return [batch[ordinal] for ordinal in sorted(batch)]

    def clear(self) -> list[GroupOutcome]:
        """Take all groups that have ended, in the order of start."""
        ended, self._ended = self._ended, {}
        return [ended[ordinal] for ordinal in sorted(ended)]

    def no_signal(self, batch_size: int) -> str:
        """The sentence for a run whose filter does not keep `batch_size` groups."""
        reasons = Counter(outcome.reason for outcome in self._ended.values() if outcome.reason)
        counts = ", ".join(f"{reason}: {number}" for reason, number in sorted(reasons.items()))
        return (
            f"{len(self._ended)} groups were played for a batch of {batch_size}, and the filter kept "
            f"{len(self.kept)} ({counts}); take tasks that are neither too hard nor too easy, raise "
            "n_samples_per_prompt, or raise max_num_gen_batches."
        )


class GroupsInFlight:
    """Groups that are being played, a task each.

    play_group: plays one. early: how they end early. on_end: called at the end of each, with its outcome;
    None = it has none.
    tasks: by ordinal, in the order of start. is_closed: no group is to start any more.
    """

    def __init__(
        self,
        play_group: PlayGroup,
        early: EarlyEnd,
        on_end: Callable[[Prompt, GroupOutcome | None], None],
    ) -> None:
        self._play_group, self._early, self._on_end = play_group, early, on_end
        self.tasks: dict[int, asyncio.Task[GroupOutcome]] = {}
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._stopped: dict[int, GroupInProgress] = {}
        self.is_closed = False

    def start(self, prompt: Prompt, version: int, begun: GroupInProgress | None) -> None:
        """Play a group, or go on with it."""
        task = asyncio.create_task(self._play_group(prompt, version=version, begun=begun))
        self.tasks[prompt.index] = task
        task.add_done_callback(partial(self._ended, prompt))

    def cancel(self, ordinal: int) -> None:
        """Cancel a group; its outcome is that of `early`."""
        self.tasks[ordinal].cancel()

    async def cancel_all(self) -> None:
        """Cancel every group, and wait until each has cleaned up."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A task that ends calls `_ended` in the next iteration of the loop.
        while self.tasks:
            await asyncio.sleep(0)

    async def all_ended(self) -> None:
        """Wait until none is left."""
        while self.tasks:
            self._changed.clear()
            await self._changed.wait()

    async def stop(self) -> Mapping[int, GroupInProgress]:
        """Stop them; those that take too long go on. Returns the groups that can go on later, by ordinal."""
        self.is_closed = True
        if self._early.stop is not None and self.tasks:
            with suppress(TimeoutError, AgentRLError):
                async with asyncio.timeout(_STOP_S):
                    await self._early.stop()
                    await self.all_ended()
        return self._stopped

    def raise_failure(self) -> None:
        """Raise the first error of a group, or of its `on_end`; once."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _ended(self, prompt: Prompt, task: asyncio.Task[GroupOutcome]) -> None:
        del self.tasks[prompt.index]
        self._changed.set()
        outcome: GroupOutcome | None = None
        if task.cancelled():
            if not self.is_closed:
                outcome = replace(self._early.cancelled(prompt), reason=self._early.reason)
        elif (error := task.exception()) is not None:
            # The first failure ends the run; `close` reports no further ones.
            self._failure = self._failure or error
        elif (begun := task.result().in_progress) is not None:
            self._stopped[prompt.index] = begun
        else:
            outcome = task.result()
        try:
            self._on_end(prompt, outcome)
        except UserError as error:
            self._failure = self._failure or error


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
    """

    def __init__(
        self,
        next_prompt: Callable[[], Prompt],
        play_group: PlayGroup,
        settings: ProducerSettings,
        policy: StalenessPolicy | None = None,
        early: EarlyEnd | None = None,
    ) -> None:
        self._next_prompt, self._settings = next_prompt, settings
        self.policy: StalenessPolicy = policy or Window(GroupPlaces(0, settings.batch_size))
        self._buffer = GroupBuffer(settings.max_broken)
        self._in_flight = GroupsInFlight(play_group, early or EarlyEnd(), self._on_end)
        # Those of the run before, until their prompts come.
        self._saved = SavedGroups()
        self._changed = asyncio.Event()
        self._num_left = settings.num_batches
        self._max_played = settings.max_num_gen_batches * settings.batch_size
        self._version = self._num_unpublished = 0
        self._is_taking = self._is_draining = False

    @property
    def version(self) -> int:
        """The policy version that is being served."""
        return self._version

    @property
    def pending(self) -> list[int]:
        """The ordinals of groups that were started and that no `take` has returned, in their order."""
        return self._buffer.pending

    @property
    def occupancy(self) -> Occupancy:
        """The places at this moment."""
        return Occupancy(
            self.policy.capacity,
            len(self._in_flight.tasks),
            self._buffer.num_waiting,
            self._blocker(),
            self._num_unpublished,
        )

    def resume(self, *, version: int, saved: SavedGroups | None = None) -> None:
        """Go on where this version is served. Before the first `take`.

        saved: groups that take the places of those that their prompts would start.
        """
        self._version = version
        self._saved = saved or self._saved

    def advance(self, num_done: int, *, version: int, is_published: bool = True) -> None:
        """Record that batches are done and `version` is served; an older one has no effect.

        A batch without a training step is done, too, and leaves the version as it was. is_published: the
        weights of all batches that are done went out, so that their groups give their places back.
        """
        del num_done
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
            await self._in_flight.all_ended()
            yield
        finally:
            self._is_draining = False
            self._admit()

    async def stop(self) -> Mapping[int, GroupInProgress]:
        """Start nothing more, and stop the groups in flight; those that take too long are left to `close`.

        Returns the groups that can go on later, by ordinal.
        """
        return await self._in_flight.stop()

    async def close(self) -> list[GroupOutcome]:
        """Cancel every group in flight and wait until each has cleaned up.

        Returns the groups that had ended and that no `take` has returned.
        """
        self._in_flight.is_closed = True
        await self._in_flight.cancel_all()
        return self._buffer.clear()

    async def _filled(self) -> list[int]:
        """Wait for the groups of the next batch; their ordinals."""
        self._is_taking = True
        try:
            while (chosen := self._chosen()) is None:
                if self._in_flight.is_closed:
                    raise asyncio.CancelledError
                if not self._in_flight.tasks:
                    raise UserError(self._buffer.no_signal(self._settings.batch_size))
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._is_taking = False
        return chosen

    def _blocker(self) -> Blocker:
        """Why no further group starts now."""
        settings, num_kept, num_in_flight = self._settings, len(self._buffer.kept), len(self._in_flight.tasks)
        if self.policy.is_on_policy and not self._is_taking:
            return "batch"
        if self._is_draining:
            return "update"
        num_left = self._num_left
        is_enough = num_left is not None and num_kept + num_in_flight >= num_left * settings.batch_size
        if self._in_flight.is_closed or is_enough:
            return "end"
        if num_in_flight + self._buffer.num_waiting + self._num_unpublished >= self.policy.capacity:
            is_window = num_kept >= settings.batch_size and self._selected() is None
            return "window" if is_window else "capacity"
        if settings.async_buffer_size is not None and num_kept >= settings.async_buffer_size:
            return "buffer"
        return "filter" if self._buffer.num_dropped + settings.batch_size > self._max_played else ""

    def _selected(self) -> list[int] | None:
        """The ordinals of the next batch among the groups that are complete; None = it has to wait."""
        straggler = self._buffer.straggler(self._in_flight.tasks)
        return self.policy.select(list(self._buffer.kept), straggler)

    def _chosen(self) -> list[int] | None:
        """As `_selected`, after what is too old was dropped and others have started."""
        self._in_flight.raise_failure()
        self._evict()
        self._admit()
        return self._selected()

    def _taken(self, chosen: Sequence[int]) -> list[GroupOutcome]:
        """The outcomes of a batch, in the order of start."""
        self._num_unpublished += len(chosen)
        if self._num_left is not None:
            self._num_left -= 1
        return self._buffer.take(chosen, self._in_flight.tasks)

    def _evict(self) -> None:
        """Drop the groups that the policy finds too old."""
        versions = self._buffer.oldest_versions(self._in_flight.tasks)
        for ordinal in self.policy.evict(versions, self._version):
            if not self._buffer.drop(ordinal, STALE):
                self._in_flight.cancel(ordinal)

    def _admit(self) -> None:
        while not self._blocker():
            self._start()

    def _start(self) -> None:
        prompt = self._next_prompt()
        ended, begun = self._saved.take(prompt)
        before = begun if ended is None else ended.group
        version = self._version if before is None else before.start_version
        self._buffer.start(prompt.index, version)
        if ended is None:
            self._in_flight.start(prompt, version, begun)
        else:
            self._changed.set()
            self._buffer.end(prompt.index, ended)

    def _on_end(self, prompt: Prompt, outcome: GroupOutcome | None) -> None:
        self._changed.set()
        if outcome is not None:
            self._buffer.end(prompt.index, outcome.ended(self._version))
            self._admit()
