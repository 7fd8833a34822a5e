"""Groups in play: which player has which, how often its player has ended, and what comes of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.players import messages
from agentrl.rollout.players.member import Member

MAX_ENDS = 3
"""Players that may end while they play one group, or before they play any, until the run ends (count)."""
_CLEAN_UP_S = 10.0


class Dispatch:
    """Each group is at one player, the least loaded one when it starts, until it has ended.

    A player that is not open yet, or whose machine is going away, is away: it gets groups only where all
    are. So one that is slow to start, or hangs there, holds none. size: players (count).
    """

    def __init__(self, size: int) -> None:
        self._groups: list[dict[int, None]] = [{} for _ in range(size)]
        self._ends: Counter[int] = Counter()
        self._early_ends = [0] * size
        self._away = set(range(size))

    def start(self, ordinal: int) -> int:
        """The player of a group that starts: of the least loaded ones the first."""
        player = min(
            range(len(self._groups)), key=lambda number: (number in self._away, len(self._groups[number]))
        )
        self._groups[player][ordinal] = None
        return player

    def end(self, ordinal: int) -> None:
        """The group has ended, or is given up."""
        for groups in self._groups:
            groups.pop(ordinal, None)
        self._ends.pop(ordinal, None)

    def of(self, player: int) -> list[int]:
        """The groups of a player, in the order of their start."""
        return list(self._groups[player])

    def at(self, ordinal: int) -> int | None:
        """The player of a group; None = it has ended."""
        return next((player for player, groups in enumerate(self._groups) if ordinal in groups), None)

    def opened(self, player: int) -> None:
        """The player has its environment."""
        self._early_ends[player] = 0
        self._away.discard(player)

    def avoid(self, player: int) -> None:
        """The player is away until it is opened again; its groups stay with it."""
        self._away.add(player)

    def move(self, ordinal: int, player: int | None = None) -> None:
        """The group goes on at a player; None = the one that a new group would get."""
        for groups in self._groups:
            groups.pop(ordinal, None)
        if player is None:
            self.start(ordinal)
        else:
            self._groups[player][ordinal] = None

    def leave(self, player: int) -> None:
        """The player is away until it is opened again: its groups go to others."""
        self.avoid(player)
        groups, self._groups[player] = self._groups[player], {}
        for ordinal in groups:
            self.start(ordinal)

    def lost(self, player: int, *, was_open: bool) -> bool:
        """The player's process has ended: it is away, and its groups stay with it. Whether another process
        may start."""
        self.avoid(player)
        groups = self.of(player)
        self._early_ends[player] += not was_open
        if was_open:
            self._ends.update(groups)
        number = max([self._early_ends[player], *(self._ends[ordinal] for ordinal in groups)])
        return number < MAX_ENDS


@dataclass(eq=False, slots=True)
class GroupAtPlayer:
    """A group at a player. waits: it is not sent, since its player is not open yet, or leaves."""

    message: messages.Play
    outcome: asyncio.Future[GroupOutcome | None]
    is_cancelled: bool = False
    waits: bool = False


class GroupsAtPlayers:
    """Groups in play: each is sent to its player, or waits for it, until it has an outcome.

    members: the players, by number. dispatch: which of them has which group.
    is_stopping: groups end as they are, and none moves any more.
    failure: why no group can be played any more; None = they can.
    """

    def __init__(self, members: Sequence[Member], size: int) -> None:
        self._members = members
        self.dispatch = Dispatch(size)
        self._entries: dict[int, GroupAtPlayer] = {}
        self._cancelled: dict[int, GroupOutcome] = {}
        self.is_stopping = False
        self.failure: BaseException | None = None

    async def play(self, message: messages.Play) -> GroupOutcome:
        """Have a group played; see `Players.play`."""
        if self.failure is not None:
            raise self.failure
        ordinal, outcome = message.prompt.index, asyncio.get_running_loop().create_future()
        entry = self._entries[ordinal] = GroupAtPlayer(message, outcome)
        self.dispatch.start(ordinal)
        self._send(ordinal)
        try:
            played = await asyncio.shield(entry.outcome)
        except asyncio.CancelledError:
            await self._cancel(ordinal, entry)
            raise
        finally:
            self._entries.pop(ordinal, None)
            number = self.dispatch.at(ordinal)
            self.dispatch.end(ordinal)
            if number is not None:
                self._take_over(number)
        assert played is not None, "only a cancelled group has no outcome"
        return played

    def cancelled(self, ordinal: int) -> GroupOutcome | None:
        """What had ended of a group whose `play` was cancelled; None = its player did not say so."""
        return self._cancelled.pop(ordinal, None)

    def playing(self, number: int) -> list[int]:
        """The groups that a player has been sent, in the order of their start."""
        return [ordinal for ordinal in self.dispatch.of(number) if not self._entries[ordinal].waits]

    def opened(self, number: int) -> None:
        """A player has its environment: its groups are sent to it."""
        self.dispatch.opened(number)
        self.send(self.dispatch.of(number))
        self._take_over(number)

    def send(self, ordinals: Iterable[int]) -> None:
        """Send groups to their players, which may be other ones now."""
        for ordinal in ordinals:
            self._send(ordinal)

    def settle(self, message: messages.Played) -> bool:
        """A player has played a group, or stopped it. Whether it goes on at another player."""
        entry, outcome = self._entries.get(message.ordinal), message.outcome
        if entry is None or entry.outcome.done():
            return False
        begun = None if outcome is None else outcome.in_progress
        if message.error is not None:
            entry.outcome.set_exception(message.error)
        elif begun is None or self.is_stopping:
            entry.outcome.set_result(outcome)
        else:
            # Its player leaves.
            entry.message = entry.message._replace(begun=begun)
            self.dispatch.move(message.ordinal)
            self._send(message.ordinal)
            return True
        return False

    def leave(self, number: int) -> None:
        """Leave the groups that a player has not begun, or that has ended, as they came to it."""
        player = self._members[number]
        for ordinal in self.dispatch.of(number):
            entry = self._entries.get(ordinal)
            is_there = player.is_open and not player.has_ended
            if entry is None or entry.outcome.done() or (is_there and not entry.waits):
                continue
            if (begun := entry.message.begun) is None:
                entry.outcome.cancel()
            else:
                entry.outcome.set_result(GroupOutcome(None, (), (), in_progress=begun))

    def fail(self, error: BaseException) -> None:
        """No group can be played any more."""
        self.failure = self.failure or error
        for entry in self._entries.values():
            if not entry.outcome.done():
                entry.outcome.set_exception(error)

    async def _cancel(self, ordinal: int, entry: GroupAtPlayer) -> None:
        entry.is_cancelled = True
        if entry.waits and not entry.outcome.done():
            entry.outcome.set_result(None)
        if (number := self.dispatch.at(ordinal)) is not None:
            self._members[number].process.send(messages.CancelGroup(ordinal))
        await asyncio.wait([entry.outcome], timeout=_CLEAN_UP_S)
        ended = entry.outcome.done() and not entry.outcome.cancelled()
        if ended and entry.outcome.exception() is None and (outcome := entry.outcome.result()) is not None:
            self._cancelled[ordinal] = outcome

    def _send(self, ordinal: int) -> None:
        entry, number = self._entries.get(ordinal), self.dispatch.at(ordinal)
        if entry is None or number is None or entry.outcome.done():
            return
        if entry.is_cancelled:
            entry.outcome.set_result(None)
            return
        player = self._members[number]
        entry.waits = not player.takes_groups
        if not entry.waits:
            player.process.send(entry.message)

    def _take_over(self, number: int) -> None:
        """A player that has less to play than others gets groups that wait for these."""
        if not self._members[number].takes_groups or self.is_stopping:
            return
        for ordinal in [ordinal for ordinal, entry in self._entries.items() if entry.waits]:
            holder = self.dispatch.at(ordinal)
            if holder is not None and len(self.dispatch.of(holder)) > len(self.dispatch.of(number)):
                self.dispatch.move(ordinal, number)
                self._send(ordinal)
