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
from agentrl.records.mirror import Mirror
from agentrl.rollout.group import GroupInProgress, GroupOutcome, GroupPlayer
from agentrl.rollout.players import messages
from agentrl.rollout.players.direct import HOLD_S, DirectClient
from agentrl.rollout.players.dispatch import Dispatch
from agentrl.rollout.players.launcher import PlayerEvents, PlayerLauncher, PlayerPlan, PlayerProcess
from agentrl.rollout.players.member import Absence, Flight, Member, last_lines
from agentrl.rollout.players.messages import names_of
from agentrl.rollout.players.requests import Requests
from agentrl.runtime.activity import Activities
from agentrl.runtime.stage import summary_of
from agentrl.types.seams import Policy, PolicyClients

SILENT_S = 60.0
"""A player sends several reports a second: after so long without one (seconds) it hangs, and is replaced."""
_CHECKS, _CLEAN_UP_S = 12, 10.0


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
        self._launcher, self._plan = launcher, plan
        self._engine, self._activities, self._on_event = engine, activities, on_event
        self._clients = clients
        self._dispatch = Dispatch(launcher.size)
        self._players: list[Member] = []
        self._flights: dict[int, Flight] = {}
        self._cancelled: dict[int, GroupOutcome] = {}
        self._restarts: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._num_started = 0
        self._in_place_of: GroupPlayer | None = None
        self._is_away = self._is_stopping = self._is_closed = False
        self._failure: BaseException | None = None
        self._contexts = ExitStack()

    async def __aenter__(self) -> Self:
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self._end_all)
            for number in range(self._launcher.size):
                self._players.append(self._started(number))
            undo.pop_all()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        assert self._watching is not None, "it was entered"
        self._watching.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        self._contexts.close()
        await self._end_all()

    async def _end_all(self) -> None:
        """End every process; an error of one does not keep the others."""
        results = await asyncio.gather(*(player.end() for player in self._players), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    @property
    def processes(self) -> Sequence[PlayerProcess]:
        """The processes, in their order."""
        return [player.process for player in self._players]

    @property
    def where(self) -> dict[str, str]:
        """Where each player runs."""
        named = [process.name.partition(" (") for process in self.processes]
        return {name: where.removesuffix(")") for name, _, where in named}

    def in_place_of(self, player: GroupPlayer) -> Self:
        """Stand for this player of the driver, which plays nothing: where its engine is away, no limit of a
        group counts, and its groups can be stopped if the driver's could."""
        self._in_place_of = player
        self._contexts.close()
        self._contexts.enter_context(player.absence.entered(Absence(self._set_away)))
        return self

    async def play(self, prompt: Prompt, version: int, begun: GroupInProgress | None = None) -> GroupOutcome:
        """Play a group, or go on with it; see `GroupPlayer.play`.

        On cancellation: the player cancels it, and this waits until it has cleaned up, 10 s at most.
        """
        if self._failure is not None:
            raise self._failure
        ordinal, outcome = prompt.index, asyncio.get_running_loop().create_future()
        flight = self._flights[ordinal] = Flight(messages.Play(prompt, version, begun), outcome)
        self._dispatch.start(ordinal)
        self._send_group(ordinal)
        try:
            played = await asyncio.shield(flight.outcome)
        except asyncio.CancelledError:
            await self._cancel(ordinal, flight)
            raise
        finally:
            self._flights.pop(ordinal, None)
            number = self._dispatch.at(ordinal)
            self._dispatch.end(ordinal)
            self._retire_idle()
            if number is not None:
                self._take_over(number)
        assert played is not None, "only a cancelled group has no outcome"
        return played

    def cancelled(self, prompt: Prompt) -> GroupOutcome:
        """The outcome of a group whose `play` was cancelled, with the episodes that had ended."""
        outcome = self._cancelled.pop(prompt.index, None)
        if outcome is not None:
            return outcome
        # Its player has ended, or did not clean up in time.
        assert self._in_place_of is not None, "groups are played in place of a player of the driver"
        return self._in_place_of.cancelled(prompt)

    @property
    def stop(self) -> Callable[[], Awaitable[None]] | None:
        """Stops all groups in play, so that they can go on later; None = they cannot."""
        return None if self._in_place_of is None or self._in_place_of.stop is None else self._stop_groups

    async def _stop_groups(self) -> None:
        self._is_stopping = True
        self._send_to_all(messages.Stop())
        # What waits for a player that may be long in coming stays as it came.
        for number in range(len(self._players)):
            self._leave_groups(number)

    def _leave_groups(self, number: int) -> None:
        """Leave the groups that a player has not begun, or that has ended, as they came to it."""
        player = self._players[number]
        for ordinal in self._dispatch.of(number):
            flight = self._flights.get(ordinal)
            is_there = player.is_open and not player.has_ended
            if flight is None or flight.outcome.done() or (is_there and not flight.waits):
                continue
            if (begun := flight.message.begun) is None:
                flight.outcome.cancel()
            else:
                flight.outcome.set_result(GroupOutcome(None, (), (), in_progress=begun))

    def _set_away(self, is_away: bool) -> None:
        self._is_away = is_away
        self._send_to_all(messages.EngineAway(is_away))

    def _send_to_all(self, message: messages.ToPlayer) -> None:
        for player in self._players:
            player.process.send(message)

    async def _cancel(self, ordinal: int, flight: Flight) -> None:
        flight.is_cancelled = True
        if flight.waits and not flight.outcome.done():
            flight.outcome.set_result(None)
        if (number := self._dispatch.at(ordinal)) is not None:
            self._players[number].process.send(messages.CancelGroup(ordinal))
        await asyncio.wait([flight.outcome], timeout=_CLEAN_UP_S)
        ended = flight.outcome.done() and not flight.outcome.cancelled()
        if ended and flight.outcome.exception() is None and (outcome := flight.outcome.result()) is not None:
            self._cancelled[ordinal] = outcome

    def _started(self, number: int) -> Member:
        """Start the process of a player."""
        self._num_started += 1
        num_replaced = self._num_started - self._launcher.size
        log = self._plan.folder / f"player-{number}{f'-{num_replaced}' if num_replaced > 0 else ''}.log"
        events = PlayerEvents(
            partial(self._receive, number),
            partial(self._on_ended, number),
            partial(self._on_leaving, number),
            self._fail,
        )
        process = self._launcher.start(number, self._plan, log, events)
        if self._is_away:
            process.send(messages.EngineAway(True))
        if self._is_stopping:
            process.send(messages.Stop())
        mirror = Mirror(self._activities, process.name, number)
        late = partial(self._end_hanging, number, f"has not ended its requests in {HOLD_S:g} s")
        direct = DirectClient(process.send, late)
        return Member(process, Requests(self._engine, process.send), direct, mirror, self._clients)

    def _receive(self, number: int, message: messages.FromPlayer) -> None:
        player = self._players[number]
        player.num_silent = 0
        match message:
            case messages.Opened():
                player.opened()
                self._dispatch.opened(number)
                for ordinal in self._dispatch.of(number):
                    self._send_group(ordinal)
                self._take_over(number)
            case messages.Failed():
                self._fail(message.error)
            case messages.Played():
                self._settle(message)
            case messages.Stepped(step):
                if self._in_place_of is not None and self._in_place_of.note is not None:
                    self._in_place_of.note(step)
            case messages.PlayerReport():
                player.mirror.show(message.report)
                player.direct.counts = message.counts
            case messages.RequestsHeld():
                player.direct.receive(message)
            case _:
                player.requests.handle(message)

    def _settle(self, message: messages.Played) -> None:
        flight, outcome = self._flights.get(message.ordinal), message.outcome
        if flight is None or flight.outcome.done():
            return
        begun = None if outcome is None else outcome.in_progress
        if message.error is not None:
            flight.outcome.set_exception(message.error)
        elif begun is None or self._is_stopping:
            flight.outcome.set_result(outcome)
        else:
            # Its player leaves.
            flight.message = flight.message._replace(begun=begun)
            self._dispatch.move(message.ordinal)
            self._send_group(message.ordinal)
            self._retire_idle()

    def _fail(self, error: BaseException) -> None:
        """No group can be played any more."""
        self._failure = self._failure or error
        for flight in self._flights.values():
            if not flight.outcome.done():
                flight.outcome.set_exception(error)

    def _on_leaving(self, number: int, left_s: float) -> None:
        """The player's machine is going away: it gets no more groups, and what can move goes on elsewhere."""
        if self._is_stopping:
            return
        player, ordinals = self._players[number], self._dispatch.of(number)
        player.leaves = True
        self._dispatch.avoid(number)
        moves = self._in_place_of is not None and self._in_place_of.can_move
        how = "go on elsewhere from where they are" if moves else "end there, if they do so in time"
        groups = f"groups {names_of(ordinals)} {how}" if ordinals else "no group was in play"
        self._on_event(f"{player.process.name}: its machine is going away{in_words(left_s)}; {groups}.")
        if moves:
            player.process.send(messages.Stop())
        self._retire_idle()

    def _retire_idle(self) -> None:
        """Replace each player that leaves and has nothing more to play."""
        for number, player in enumerate(self._players):
            playing = [o for o in self._dispatch.of(number) if not self._flights[o].waits]
            is_idle = not (player.is_open and playing)
            if player.leaves and is_idle and not (player.has_ended or self._is_closed):
                player.has_ended = True
                self._begin(self._retire(number))

    async def _retire(self, number: int) -> None:
        await self._players[number].end()
        self._start_again(number)

    async def _watch(self) -> None:
        """End each player that hangs. However long this process stands still, that is one check."""
        while True:
            await asyncio.sleep(SILENT_S / _CHECKS)
            for number, player in enumerate(self._players):
                if player.num_silent is None:
                    continue
                player.num_silent += 1
                if player.num_silent > _CHECKS:
                    self._end_hanging(number, f"has sent nothing for {SILENT_S:g} s")

    def _end_hanging(self, number: int, reason: str) -> None:
        player = self._players[number]
        if not player.has_ended:
            player.process.close()
            self._on_ended(number, f"{reason}, and was ended")

    def _on_ended(self, number: int, reason: str = "") -> None:
        """The player's process has ended, or is ended for a reason."""
        player = self._players[number]
        if player.has_ended:
            return
        player.has_ended = True
        player.closed()
        if self._is_closed or self._failure is not None:
            return
        if self._is_stopping:
            self._leave_groups(number)
        # No fault of its groups, where it leaves.
        may_restart = player.leaves or self._dispatch.lost(number, was_open=player.is_open)
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
            self._fail(error)

    async def _replace(self, number: int, reason: str, may_restart: bool) -> None:
        player = self._players[number]
        # The same sessions begin again.
        await player.requests.close()
        reason = reason or await player.process.end_reason()
        await player.process.kill()
        if self._is_closed:
            return
        playing = names_of(o for o in self._dispatch.of(number) if not self._flights[o].waits)
        what, log = f"{player.process.name} {reason}", player.process.log
        where = f"(see {log}{last_lines(log)})"
        if not may_restart:
            at = f"while it played {playing}" if playing and player.is_open else "before it played anything"
            self._fail(
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
        if self._is_closed or self._is_stopping:
            return
        ordinals = self._dispatch.of(number)
        if leaves:
            self._dispatch.leave(number)
        self._players[number] = self._started(number)
        for ordinal in ordinals:
            self._send_group(ordinal)

    def _send_group(self, ordinal: int) -> None:
        """Send a group to its player, which may be another one now."""
        flight, number = self._flights.get(ordinal), self._dispatch.at(ordinal)
        if flight is None or number is None or flight.outcome.done():
            return
        if flight.is_cancelled:
            flight.outcome.set_result(None)
            return
        player = self._players[number]
        flight.waits = not player.takes_groups
        if not flight.waits:
            player.process.send(flight.message)

    def _take_over(self, number: int) -> None:
        """A player that has less to play than others gets groups that wait for these."""
        if not self._players[number].takes_groups or self._is_stopping:
            return
        for ordinal in [ordinal for ordinal, flight in self._flights.items() if flight.waits]:
            holder = self._dispatch.at(ordinal)
            if holder is not None and len(self._dispatch.of(holder)) > len(self._dispatch.of(number)):
                self._dispatch.move(ordinal, number)
                self._send_group(ordinal)
