"""A player and a group at it, as their driver sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.records.mirror import Mirror
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.players import messages
from agentrl.rollout.players.direct import DirectClient
from agentrl.rollout.players.launcher import PlayerProcess
from agentrl.rollout.players.requests import Requests
from agentrl.types.seams import PolicyClients

_LOG_LINES, _LOG_BYTES = 3, 4096


@dataclass(eq=False, slots=True)
class Flight:
    """A group at a player. waits: it is not sent, since its player is not open yet, or leaves."""

    message: messages.Play
    outcome: asyncio.Future[GroupOutcome | None]
    is_cancelled: bool = False
    waits: bool = False


@dataclass(eq=False, slots=True)
class Member:
    """A player's process, which another one replaces where it ends.

    clients: of the engine, where it sends requests to servers itself. is_open: it has its environment.
    leaves: its machine is going away. has_ended: another one is about to take its place. num_silent: checks
    since its last message (count); None = it has not sent one yet, since it still starts.
    """

    process: PlayerProcess
    requests: Requests
    direct: DirectClient
    mirror: Mirror
    clients: PolicyClients | None
    is_open: bool = False
    leaves: bool = False
    has_ended: bool = False
    num_silent: int | None = None

    @property
    def takes_groups(self) -> bool:
        """Whether a group may be sent to it."""
        return self.is_open and not (self.leaves or self.has_ended)

    def opened(self) -> None:
        """It has its environment, and plays."""
        self.is_open = True
        self.mirror.name = self.process.name
        if self.clients is not None:
            self.clients.add(self.direct)

    def closed(self) -> None:
        """It does nothing any more, for whoever counts on it."""
        self.mirror.clear()
        self.direct.end()
        if self.clients is not None:
            self.clients.remove(self.direct)

    async def end(self) -> None:
        """Have it end. One that plays gets some seconds, in which its groups clean up."""
        self.closed()
        self.process.close()
        await self.requests.close()
        if self.is_open:
            await self.process.end_reason()
        await self.process.kill()


class Absence:
    """Where the engine is away, the limits of groups stop in the players, too."""

    def __init__(self, set_away: Callable[[bool], None]) -> None:
        self._set_away = set_away

    def stop(self) -> None:
        """The engine is away."""
        self._set_away(True)

    def resume(self) -> None:
        """It is there again."""
        self._set_away(False)


def last_lines(log: Path) -> str:
    """The end of a player's output, after a colon; "" = there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _LOG_BYTES, 0))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    return f": {' | '.join(lines)}" if lines else ""
