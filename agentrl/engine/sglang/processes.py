"""The processes that a fleet watches and restarts, wherever they run."""

from __future__ import annotations

from typing import Protocol


class Process(Protocol):
    """A server process that can be started, and restarted at the same address while its machine lasts."""

    name: str

    @property
    def role(self) -> str:
        """Its stage of a request (prefill, decode, or both); each role needs a server."""

    @property
    def url(self) -> str:
        """Its address."""

    @property
    def running(self) -> bool:
        """Whether its process runs."""

    @property
    def end_reason(self) -> str:
        """How it ended, for an error message."""

    @property
    def left_s(self) -> float | None:
        """How long its machine is still there, where that is going away (seconds); None = it stays."""

    def log_tail(self) -> str:
        """The last lines of its log, with a heading; "" where it has none here."""

    async def start(self) -> None:
        """Start it, and wait until it is healthy."""

    async def stop(self) -> None:
        """Stop it and all its children."""


class Router(Protocol):
    """A router process in front of servers. After a restart it has no servers."""

    @property
    def end_reason(self) -> str:
        """How it ended, for an error message."""

    def log_tail(self) -> str:
        """The last lines of its log, with a heading."""

    @property
    def running(self) -> bool:
        """Whether its process runs."""

    async def start(self) -> None:
        """Restart it, and wait until it answers."""

    async def add(self, url: str) -> None:
        """Add a server."""

    async def remove(self, url: str) -> None:
        """Remove a server."""
