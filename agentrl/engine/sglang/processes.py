"""Programs of a fleet, wherever they run: servers and their router, which are watched and restarted."""

from __future__ import annotations

from typing import Protocol


class Program(Protocol):
    """A program that listens, on any machine; at most one process of it runs."""

    @property
    def url(self) -> str:
        """Its address; of a server elsewhere, once it was checked or started."""

    @property
    def running(self) -> bool:
        """Whether its process, or one of its children, runs; also one that hangs."""

    @property
    def end_reason(self) -> str:
        """How it ended, for an error message."""

    async def start(self) -> None:
        """Start or restart it, and wait until it answers. On interruption it is stopped.

        Raises:
            EngineUnavailableError: it ended, or did not answer in time; with the last lines of its log.
        """

    async def stop(self) -> None:
        """End it and all its children, and wait. Does nothing where it does not run."""

    def log_tail(self) -> str:
        """The last lines of its log, with a heading; "" where it has none here."""


class Process(Program, Protocol):
    """A server that can be restarted at the same address while its machine lasts."""

    name: str

    @property
    def role(self) -> str:
        """Its stage of a request (prefill, decode, or both); each role needs a server."""

    @property
    def left_s(self) -> float | None:
        """How long its machine is still there, where that is going away (seconds); None = it stays."""


class Router(Program, Protocol):
    """A router in front of servers. After a restart it has no servers."""

    async def add(self, url: str) -> None:
        """Add a server."""

    async def remove(self, url: str) -> None:
        """Remove a server."""
