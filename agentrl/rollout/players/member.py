"""A player, as its driver sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentrl.records.mirror import Mirror
from agentrl.rollout.players import messages
from agentrl.rollout.players.direct import DirectClient
from agentrl.rollout.players.launcher import PlayerEvents, PlayerLauncher, PlayerPlan, PlayerProcess
from agentrl.rollout.players.requests import Requests
from agentrl.runtime.activity import Activities
from agentrl.types.seams import Policy, PolicyClients

_LOG_LINES, _LOG_BYTES = 3, 4096


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

    def is_silent_for(self, checks: int) -> bool:
        """Check it once more. Whether it has sent nothing for more than so many checks."""
        if self.num_silent is None:
            return False
        self.num_silent += 1
        return self.num_silent > checks

    def receive(self, message: messages.MemberMessage) -> None:
        """A message of it about its own requests, or what it does."""
        match message:
            case messages.PlayerReport():
                self.mirror.show(message.report)
                self.direct.counts = message.counts
            case messages.RequestsHeld():
                self.direct.receive(message)
            case _:
                self.requests.handle(message)

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


class MemberStarter:
    """Starts the processes of players.

    launcher: where they run, and how many. engine: for their requests. activities: show what they do.
    clients: of the engine, where they send requests to its servers themselves.
    """

    def __init__(
        self,
        launcher: PlayerLauncher,
        plan: PlayerPlan,
        engine: Policy,
        activities: Activities,
        clients: PolicyClients | None,
    ) -> None:
        self._launcher, self._plan = launcher, plan
        self._engine, self._activities, self._clients = engine, activities, clients
        self._num_started = 0

    @property
    def size(self) -> int:
        """Players that run at once (count)."""
        return self._launcher.size

    def start(self, number: int, events: PlayerEvents, late: Callable[[], None]) -> Member:
        """Start a process of a player. late: called where it does not hold its requests in time.

        Raises:
            OSError: it cannot be started.
        """
        self._plan.folder.mkdir(parents=True, exist_ok=True)
        self._num_started += 1
        num_replaced = self._num_started - self._launcher.size
        log = self._plan.folder / f"player-{number}{f'-{num_replaced}' if num_replaced > 0 else ''}.log"
        process = self._launcher.start(number, self._plan, log, events)
        mirror = Mirror(self._activities, process.name, number)
        direct = DirectClient(process.send, late)
        return Member(process, Requests(self._engine, process.send), direct, mirror, self._clients)


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
