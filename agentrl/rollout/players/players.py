"""Players of a run, the driver's side: processes that play its groups."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from agentrl.activity import Activities
from agentrl.data import Prompt
from agentrl.errors import AgentRLError, WorldBrokenError
from agentrl.observe.mirror import Mirror
from agentrl.protocols import Policy
from agentrl.rollout.group import GroupInProgress, GroupOutcome, GroupPlayer
from agentrl.rollout.players import messages
from agentrl.rollout.players.dispatch import Dispatch
from agentrl.rollout.players.launcher import PlayerEvents, PlayerLauncher, PlayerPlan, PlayerProcess
from agentrl.rollout.players.requests import Requests

SILENT_S = 60.0
"""A player sends several reports a second: after so long without one (seconds) it hangs, and is replaced."""
_CHECKS = 12
_CLEAN_UP_S = 10.0
_LOG_LINES, _LOG_BYTES = 3, 4096


@dataclass(eq=False, slots=True)
class _Flight:
    """A group at a player."""

    message: messages.Play
    outcome: asyncio.Future[GroupOutcome | None]
    is_cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Player:
    """A player's process, which another one replaces where it ends.

    num_silent: checks since its last message (count). has_ended: another one is about to take its place.
    """

    process: PlayerProcess
    requests: Requests
    mirror: Mirror
    is_open: bool = False
    has_ended: bool = False
    num_silent: int = 0


class _Absence:
    """Where the engine is away, the limits of groups stop in the players, too."""

    def __init__(self, set_away: Callable[[bool], None]) -> None:
        self._set_away = set_away

    def stop(self) -> None:
        """The engine is away."""
        self._set_away(True)

    def resume(self) -> None:
        """It is there again."""
        self._set_away(False)


class Players:
    """Plays groups in processes; each is at the least loaded one. It stands for a `GroupPlayer`.

    consumes: groups. waits for: their outcomes. unblocked by: these, each bounded by the deadlines of its
    episodes. on shutdown: every process is ended. A process that ends, or that sends nothing for `SILENT_S`,
    is replaced, and its groups are played again from reset under the same ordinals, or from where they were
    begun.

    launcher: where they run, and how many. engine: for the requests of all. on_event: called with a sentence
    where a player has ended.

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
    ) -> None:
        self._launcher, self._plan = launcher, plan
        self._engine, self._activities, self._on_event = engine, activities, on_event
        self._dispatch = Dispatch(launcher.size)
        self._players: list[_Player] = []
        self._flights: dict[int, _Flight] = {}
        self._cancelled: dict[int, GroupOutcome] = {}
        self._restarts: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._num_started = 0
        self._in_place_of: GroupPlayer | None = None
        self._is_away = self._is_stopping = self._is_closed = False
        self._failure: AgentRLError | None = None
        self._contexts = ExitStack()

    async def __aenter__(self) -> Self:
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        self._players = [self._started(number) for number in range(self._launcher.size)]
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
        await asyncio.gather(*map(self._end, self._players))

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
        self._contexts.enter_context(player.absence.entered(_Absence(self._set_away)))
        return self

    async def play(self, prompt: Prompt, version: int, begun: GroupInProgress | None = None) -> GroupOutcome:
        """Play a group, or go on with it; see `GroupPlayer.play`.

        On cancellation: the player cancels it, and this waits until it has cleaned up, 10 s at most.
        """
        if self._failure is not None:
            raise self._failure
        ordinal, outcome = prompt.index, asyncio.get_running_loop().create_future()
        flight = self._flights[ordinal] = _Flight(messages.Play(prompt, version, begun), outcome)
        number = self._dispatch.start(ordinal)
        self._players[number].process.send(flight.message)
        try:
            played = await asyncio.shield(flight.outcome)
        except asyncio.CancelledError:
            await self._cancel(ordinal, flight)
            raise
        finally:
            self._flights.pop(ordinal, None)
            self._dispatch.end(ordinal)
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
        for number, player in enumerate(self._players):
            if not player.is_open or player.has_ended:
                self._leave_groups(number)

    def _leave_groups(self, number: int) -> None:
        """Leave the groups of a player, which has not played them or has ended, as they came to it."""
        for ordinal in self._dispatch.of(number):
            flight = self._flights.get(ordinal)
            if flight is None or flight.outcome.done():
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

    async def _cancel(self, ordinal: int, flight: _Flight) -> None:
        flight.is_cancelled = True
        if (number := self._dispatch.at(ordinal)) is not None:
            self._players[number].process.send(messages.CancelGroup(ordinal))
        await asyncio.wait([flight.outcome], timeout=_CLEAN_UP_S)
        if flight.outcome.done() and not flight.outcome.cancelled() and flight.outcome.exception() is None:
            outcome = flight.outcome.result()
            if outcome is not None:
                self._cancelled[ordinal] = outcome

    async def _end(self, player: _Player) -> None:
        player.mirror.clear()
        player.process.close()
        await player.requests.close()
        if player.is_open and not player.has_ended:
            # Its groups clean up.
            await player.process.end_reason()
        await player.process.kill()

    def _started(self, number: int) -> _Player:
        """Start the process of a player."""
        self._num_started += 1
        num_replaced = self._num_started - self._launcher.size
        log = self._plan.folder / f"player-{number}{f'-{num_replaced}' if num_replaced > 0 else ''}.log"
        events = PlayerEvents(partial(self._receive, number), partial(self._on_ended, number))
        process = self._launcher.start(number, self._plan, log, events)
        if self._is_away:
            process.send(messages.EngineAway(True))
        if self._is_stopping:
            process.send(messages.Stop())
        mirror = Mirror(self._activities, process.name, number)
        return _Player(process, Requests(self._engine, process.send), mirror)

    def _receive(self, number: int, message: messages.FromPlayer) -> None:
        player = self._players[number]
        player.num_silent = 0
        match message:
            case messages.Opened():
                player.is_open = True
                player.mirror.name = player.process.name
                self._dispatch.opened(number)
            case messages.Failed():
                self._fail(message.error)
            case messages.Played():
                self._settle(message)
            case messages.InProgress():
                player.mirror.show(message.report)
            case _:
                player.requests.handle(message)

    def _settle(self, message: messages.Played) -> None:
        flight = self._flights.get(message.ordinal)
        if flight is None or flight.outcome.done():
            return
        if message.error is not None:
            flight.outcome.set_exception(message.error)
        else:
            flight.outcome.set_result(message.outcome)

    def _fail(self, error: AgentRLError) -> None:
        """No group can be played any more."""
        self._failure = self._failure or error
        for flight in self._flights.values():
            if not flight.outcome.done():
                flight.outcome.set_exception(error)

    async def _watch(self) -> None:
        """End each player that hangs. However long this process stands still, that is one check."""
        while True:
            await asyncio.sleep(SILENT_S / _CHECKS)
            for number, player in enumerate(self._players):
                player.num_silent += player.is_open
                if player.num_silent > _CHECKS and not player.has_ended:
                    player.process.close()
                    self._on_ended(number, f"has sent nothing for {SILENT_S:g} s, and was ended")

    def _on_ended(self, number: int, reason: str = "") -> None:
        """The player's process has ended, or is ended for a reason."""
        player = self._players[number]
        player.has_ended = True
        player.mirror.clear()
        if self._is_closed or self._failure is not None:
            return
        if self._is_stopping:
            self._leave_groups(number)
        may_restart = self._dispatch.lost(number, was_open=player.is_open)
        restart = asyncio.get_running_loop().create_task(self._replace(number, reason, may_restart))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    async def _replace(self, number: int, reason: str, may_restart: bool) -> None:
        player = self._players[number]
        # The same sessions begin again.
        await player.requests.close()
        reason = reason or await player.process.end_reason()
        await player.process.kill()
        if self._is_closed:
            return
        ordinals = self._dispatch.of(number)
        playing = ", ".join(f"g{ordinal}" for ordinal in ordinals)
        what, log = f"{player.process.name} {reason}", player.process.log
        where = f"(see {log}{_last_lines(log)})"
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
        if self._is_stopping:
            return
        if player.process.machine_is_gone:
            self._dispatch.leave(number)
        self._players[number] = self._started(number)
        for ordinal in ordinals:
            self._play_again(ordinal)

    def _play_again(self, ordinal: int) -> None:
        """Send a group to its player, which may be another one now."""
        flight, number = self._flights.get(ordinal), self._dispatch.at(ordinal)
        if flight is None or number is None or flight.outcome.done():
            return
        if flight.is_cancelled:
            flight.outcome.set_result(None)
        else:
            self._players[number].process.send(flight.message)


def _last_lines(log: Path) -> str:
    """The end of a player's output, after a colon; "" = there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _LOG_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    return f": {' | '.join(lines)}" if lines else ""
