"""Players of a run, the driver's side: processes that play its groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from types import TracebackType
from typing import Self

from agentrl.data import Prompt
from agentrl.errors import WorldBrokenError
from agentrl.processes.ray.draining import in_words
from agentrl.rollout.group import GroupInProgress, GroupOutcome, GroupPlayer
from agentrl.rollout.players import messages
from agentrl.rollout.players.direct import HOLD_S
from agentrl.rollout.players.dispatch import GroupsAtPlayers
from agentrl.rollout.players.launcher import PlayerEvents, PlayerLauncher, PlayerPlan, PlayerProcess
from agentrl.rollout.players.member import Absence, Member, MemberStarter, last_lines
from agentrl.rollout.players.messages import names_of
from agentrl.runtime.activity import Activities
from agentrl.runtime.stage import summary_of
from agentrl.types.seams import Policy, PolicyClients

SILENT_S = 60.0
"""A player sends several reports a second: after so long without one (seconds) it hangs, and is replaced."""
_CHECKS = 12


class PlayerPool:
    """The processes of players: each that ends, hangs or leaves with its machine is replaced.

    starter: starts them. on_event: called with a sentence where a player has ended.
    members: the players, by number. groups: those at them.
    in_place_of: the player of the driver that they stand for; None = until one is named.
    """

    def __init__(self, starter: MemberStarter, on_event: Callable[[str], None]) -> None:
        self._starter, self._on_event = starter, on_event
        self.members: list[Member] = []
        self.groups = GroupsAtPlayers(self.members, starter.size)
        self.in_place_of: GroupPlayer | None = None
        self._is_away = self._is_closed = False
        self._restarts: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start all processes; where one cannot be started, none stays."""
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._end_all)
            for number in range(self._starter.size):
                self.members.append(self._started(number))
            undo.pop_all()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        assert self._watching is not None, "they were started"
        self._watching.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await self._end_all()

    async def stop(self) -> None:
        """Stop all groups in play, so that they can go on later."""
        self.groups.is_stopping = True
        self._send_to_all(messages.Stop())
        # What waits for a player that may be long in coming stays as it came.
        for number in range(len(self.members)):
            self.groups.leave(number)

    def set_away(self, is_away: bool) -> None:
        """The engine is away, or there again."""
        self._is_away = is_away
        self._send_to_all(messages.EngineAway(is_away))

    def retire_idle(self) -> None:
        """Replace each player that leaves and has nothing more to play."""
        for number, player in enumerate(self.members):
            playing = self.groups.playing(number)
            is_idle = not (player.is_open and playing)
            if player.leaves and is_idle and not (player.has_ended or self._is_closed):
                player.has_ended = True
                self._begin(self._retire(number))

    async def _end_all(self) -> None:
        """End every process; an error of one does not keep the others."""
        results = await asyncio.gather(*(player.end() for player in self.members), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    def _send_to_all(self, message: messages.ToPlayer) -> None:
        for player in self.members:
            player.process.send(message)

    def _started(self, number: int) -> Member:
        """Start the process of a player."""
        events = PlayerEvents(
            partial(self._receive, number),
            partial(self._on_ended, number),
            partial(self._on_leaving, number),
            self.groups.fail,
        )
        late = partial(self._end_hanging, number, f"has not ended its requests in {HOLD_S:g} s")
        member = self._starter.start(number, events, late)
        if self._is_away:
            member.process.send(messages.EngineAway(True))
        if self.groups.is_stopping:
            member.process.send(messages.Stop())
        return member

    def _receive(self, number: int, message: messages.FromPlayer) -> None:
        player = self.members[number]
        player.num_silent = 0
        match message:
            case messages.Opened():
                player.opened()
                self.groups.opened(number)
            case messages.Failed():
                self.groups.fail(message.error)
            case messages.Played():
                if self.groups.settle(message):
                    self.retire_idle()
            case messages.Stepped(step):
                if self.in_place_of is not None and self.in_place_of.note is not None:
                    self.in_place_of.note(step)
            case _:
                player.receive(message)

    def _on_leaving(self, number: int, left_s: float) -> None:
        """The player's machine is going away: it gets no more groups, and what can move goes on elsewhere."""
        if self.groups.is_stopping:
            return
        player, ordinals = self.members[number], self.groups.dispatch.of(number)
        player.leaves = True
        self.groups.dispatch.avoid(number)
        moves = self.in_place_of is not None and self.in_place_of.can_move
        how = "go on elsewhere from where they are" if moves else "end there, if they do so in time"
        groups = f"groups {names_of(ordinals)} {how}" if ordinals else "no group was in play"
        self._on_event(f"{player.process.name}: its machine is going away{in_words(left_s)}; {groups}.")
        if moves:
            player.process.send(messages.Stop())
        self.retire_idle()

    async def _retire(self, number: int) -> None:
        await self.members[number].end()
        self._start_again(number)

    async def _watch(self) -> None:
        """End each player that hangs. However long this process stands still, that is one check."""
        while True:
            await asyncio.sleep(SILENT_S / _CHECKS)
            for number, player in enumerate(self.members):
                if player.is_silent_for(_CHECKS):
                    self._end_hanging(number, f"has sent nothing for {SILENT_S:g} s")

    def _end_hanging(self, number: int, reason: str) -> None:
        player = self.members[number]
        if not player.has_ended:
            player.process.close()
            self._on_ended(number, f"{reason}, and was ended")

    def _on_ended(self, number: int, reason: str = "") -> None:
        """The player's process has ended, or is ended for a reason."""
        player = self.members[number]
        if player.has_ended:
            return
        player.has_ended = True
        player.closed()
        if self._is_closed or self.groups.failure is not None:
            return
        if self.groups.is_stopping:
            self.groups.leave(number)
        # No fault of its groups, where it leaves.
        may_restart = player.leaves or self.groups.dispatch.lost(number, was_open=player.is_open)
        self._begin(self._replace(number, reason, may_restart))

    def _begin(self, restart: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(restart)
        self._restarts.add(task)
        task.add_done_callback(self._on_restarted)

    def _on_restarted(self, restart: asyncio.Task[None]) -> None:
        self._restarts.discard(restart)
        error = None if restart.cancelled() else restart.exception()
        if isinstance(error, OSError):
            error = WorldBrokenError(
                f"a player has ended, and no other can be started ({summary_of(error)}); make room in memory "
                "and on the disk, then resume with --resume."
            )
        if error is not None:
            self.groups.fail(error)

    async def _replace(self, number: int, reason: str, may_restart: bool) -> None:
        player = self.members[number]
        # The same sessions begin again.
        await player.requests.close()
        reason = reason or await player.process.end_reason()
        await player.process.kill()
        if self._is_closed:
            return
        playing = names_of(self.groups.playing(number))
        what, log = f"{player.process.name} {reason}", player.process.log
        where = f"(see {log}{last_lines(log)})"
        if not may_restart:
            at = f"while it played {playing}" if playing and player.is_open else "before it played anything"
            self.groups.fail(
                WorldBrokenError(
                    f"{what} {at}, as others did before it {where}; mend the environment, or give the run "
                    "more memory."
                )
            )
            return
        again = f"groups {playing} are played again" if playing else "no group was in play"
        self._on_event(f"Warning: {what}; {again} {where}.")
        self._start_again(number, leaves=player.leaves or player.process.machine_is_gone)

    def _start_again(self, number: int, *, leaves: bool = True) -> None:
        """Start the player's next process. leaves: on another machine, and until then others play."""
        if self._is_closed or self.groups.is_stopping:
            return
        ordinals = self.groups.dispatch.of(number)
        if leaves:
            self.groups.dispatch.leave(number)
        self.members[number] = self._started(number)
        self.groups.send(ordinals)


class Players:
    """Plays groups in processes; each is at the least loaded one. It stands for a `GroupPlayer`.

    consumes: groups. waits for: their outcomes. unblocked by: these, each bounded by the deadlines of its
    episodes. on shutdown: every process is ended. A process that ends, or that sends nothing for `SILENT_S`,
    is replaced, and its groups are played again from reset under the same ordinals, or from where they were
    begun. Where its machine is going away, they are stopped, where they can be, and go on at other players.
    Groups of a player that is not open yet wait for it, or go to others that have less to play.

    launcher: where they run, and how many. engine: for the requests of all. on_event: called with a sentence
    where a player has ended. clients: of the engine, where players send requests to its servers themselves.

    Raises (from play):
        WorldBrokenError: players ended `MAX_ENDS` times while they played one group, or before any.
        UserError: a player cannot be built.
    """

    def __init__(
        self,
        launcher: PlayerLauncher,
        plan: PlayerPlan,
        engine: Policy,
        activities: Activities,
        on_event: Callable[[str], None],
        clients: PolicyClients | None = None,
    ) -> None:
        starter = MemberStarter(launcher, plan, engine, activities, clients)
        self._pool = PlayerPool(starter, on_event)
        self._contexts = ExitStack()

    async def __aenter__(self) -> Self:
        await self._pool.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.close()
        await self._pool.close()

    @property
    def processes(self) -> Sequence[PlayerProcess]:
        """The processes, in their order."""
        return [player.process for player in self._pool.members]

    @property
    def where(self) -> dict[str, str]:
        """Where each player runs."""
        named = [process.name.partition(" (") for process in self.processes]
        return {name: where.removesuffix(")") for name, _, where in named}

    def in_place_of(self, player: GroupPlayer) -> Self:
        """Stand for this player of the driver, which plays nothing: where its engine is away, no limit of a
        group counts, and its groups can be stopped if the driver's could."""
        self._pool.in_place_of = player
        self._contexts.close()
        self._contexts.enter_context(player.absence.entered(Absence(self._pool.set_away)))
        return self

    async def play(self, prompt: Prompt, version: int, begun: GroupInProgress | None = None) -> GroupOutcome:
        """Play a group, or go on with it; see `GroupPlayer.play`.

        On cancellation: the player cancels it, and this waits until it has cleaned up, 10 s at most.
        """
        try:
            return await self._pool.groups.play(messages.Play(prompt, version, begun))
        finally:
            self._pool.retire_idle()

    def cancelled(self, prompt: Prompt) -> GroupOutcome:
        """The outcome of a group whose `play` was cancelled, with the episodes that had ended."""
        outcome = self._pool.groups.cancelled(prompt.index)
        if outcome is not None:
            return outcome
        # Its player has ended, or did not clean up in time.
        driver = self._pool.in_place_of
        assert driver is not None, "groups are played in place of a player of the driver"
        return driver.cancelled(prompt)

    @property
    def stop(self) -> Callable[[], Awaitable[None]] | None:
        """Stops all groups in play, so that they can go on later; None = they cannot."""
        driver = self._pool.in_place_of
        return None if driver is None or driver.stop is None else self._pool.stop
