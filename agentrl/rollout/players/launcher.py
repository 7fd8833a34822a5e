"""The seam between what a player is and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from agentrl.errors import AgentRLError
from agentrl.rollout.players import messages


class PlayerPlan(NamedTuple):
    """How a player starts: `python -m MODULE FD`, to which the first message on the pipe is `plan`.

    folder: for the output of players, player-0.log and so on; on the driver's machine.
    """

    module: str
    plan: bytes
    folder: Path


class PlayerEvents(NamedTuple):
    """Called in the driver's event loop. received: with each message of the player. ended: once, after the
    last message; not where the driver has closed the player. leaving: once, where its machine is going away,
    with how long it is still there (seconds; infinite where nobody knows). failed: where a message cannot be
    sent, or read."""

    received: Callable[[messages.FromPlayer], None]
    ended: Callable[[], None]
    leaving: Callable[[float], None]
    failed: Callable[[AgentRLError], None]


class PlayerProcess(Protocol):
    """A player's process, for its driver. name: with its process and its machine. log: its output."""

    log: Path

    @property
    def name(self) -> str:
        """Which player, and which process."""

    async def pid(self) -> int:
        """The process on its machine.

        Raises:
            RemoteError: it has gone, with the actor that started it.
        """

    @property
    def machine_is_gone(self) -> bool:
        """Whether it ended with its machine."""

    def send(self, message: messages.ToPlayer) -> None:
        """Send a message without waiting, after the plan and all earlier ones, unless it has ended."""

    def close(self) -> None:
        """Have it cancel its groups, clean up and end; its messages are not received any more."""

    async def end_reason(self) -> str:
        """How it ended, after a wait of a few seconds for that."""

    async def kill(self) -> None:
        """End it, whatever it does."""


class PlayerLauncher(Protocol):
    """Starts players. size: players that run at once (count)."""

    @property
    def size(self) -> int:
        """Players that run at once (count)."""

    def start(self, number: int, plan: PlayerPlan, log: Path, events: PlayerEvents) -> PlayerProcess:
        """Start a player without waiting. number: from 0; another one with that number has ended."""
