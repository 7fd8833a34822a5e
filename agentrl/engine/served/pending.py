"""The completions of a server that run or wait: whose they are, and how many a client may have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from agentrl.engine.served.requests import CompletionRequest, RefusedError
from agentrl.engine.sglang.wire import ROUTING_KEY

MAX_OF_CLIENT = 4096
"""The most pending completions of one address."""
MAX_OF_ALL = 16_384


class Client(NamedTuple):
    """The sender of a request: its IP address, and its routing key, if any."""

    address: str
    key: str | None

    @classmethod
    def of(cls, request: Request) -> Client:
        """The sender of a request."""
        address = "" if request.client is None else request.client.host
        return cls(address, request.headers.get(ROUTING_KEY))

    @property
    def names(self) -> tuple[str, str]:
        """As in `Turns`: addresses take turns, and so do the keys of one address."""
        return self.address, self.key or ""


class Pending:
    """Pending completions. sessions: the engine's session of each, by its rid."""

    def __init__(self) -> None:
        self.sessions: dict[str, str] = {}
        self._of_address: Counter[str] = Counter()

    def check(self, client: Client, items: Sequence[CompletionRequest]) -> None:
        """Check that completions can be added.

        Raises:
            HTTPException: 503, too many of this client, or of all, are pending.
            RefusedError: one has the rid of a pending one.
        """
        own = self._of_address[client.address]
        if own + len(items) > MAX_OF_CLIENT or len(self.sessions) + len(items) > MAX_OF_ALL:
            raise HTTPException(
                503,
                f"{own:,} completions of this client are pending, {len(self.sessions):,} of all clients; "
                "send the request again.",
            )
        duplicate = next((item.rid for item in items if item.rid in self.sessions), None)
        if duplicate is not None:
            raise RefusedError(f"Duplicate request ID detected: {duplicate}")

    @contextmanager
    def entered(self, client: Client, rid: str, session: str) -> Iterator[None]:
        """A completion is pending during the block."""
        self.sessions[rid] = session
        self._of_address[client.address] += 1
        try:
            yield
        finally:
            self.sessions.pop(rid, None)
            self._of_address[client.address] -= 1
            if not self._of_address[client.address]:
                del self._of_address[client.address]
