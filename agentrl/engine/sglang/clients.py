"""The processes that send requests to the servers of a fleet: this one, and players with their own policy.

consumes: new clients, holds. waits for: the end of every running request, wherever it was sent. unblocked by:
that, or the end of the client. Where blocks that hold requests overlap, requests go on after the last one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from agentrl.engine.sglang.client import SGLangPolicy
from agentrl.types.seams import PolicyClient


class Clients:
    """All of them; see `PolicyClients`. policy: this process's own."""

    def __init__(self, policy: SGLangPolicy) -> None:
        self._policy = policy
        self._others: dict[PolicyClient, None] = {}
        self._ended = Counter[str]()
        self._num_holds = 0

    def add(self, client: PolicyClient) -> None:
        """Hold it from now on whenever requests are held, and count its requests."""
        self._others[client] = None
        if not self._num_holds:
            client.release(self._policy.salt)

    def remove(self, client: PolicyClient) -> None:
        """It has ended; one that was not added is ignored."""
        if client in self._others:
            del self._others[client]
            self._ended.update(client.counts)

    @property
    def counts(self) -> Mapping[str, int]:
        """The requests of all, those that have ended included; see `SGLangPolicy.counts`."""
        counts = self._policy.counts + self._ended
        for client in self._others:
            counts.update(client.counts)
        return counts

    @asynccontextmanager
    async def held(self, abort_all: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[float]:
        """Hold the requests of all during the block; see `SGLangPolicy.held`."""
        self._num_holds += 1
        holding = [asyncio.ensure_future(client.hold()) for client in self._others]
        try:
            if holding and abort_all is not None:
                # They are asked in the next turn of the loop. What they send until then, they end themselves.
                await asyncio.sleep(0)
                await abort_all()
            async with self._policy.held(abort_all) as ended_at:
                yield min([ended_at, *await asyncio.gather(*holding)])
        finally:
            for each in holding:
                each.cancel()
            self._num_holds -= 1
            if not self._num_holds:
                for client in self._others:
                    client.release(self._policy.salt)
