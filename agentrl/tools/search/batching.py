"""Many callers, few calls: what is asked while a call runs goes together into the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from agentrl.errors import ToolError

_Q = TypeVar("_Q")
_A = TypeVar("_A")


@dataclass(eq=False)
class _Batch(Generic[_Q, _A]):
    """Queries that go together, by the number of who asked. work: its answers, by the same numbers."""

    queries: dict[int, _Q] = field(default_factory=dict)
    asked: int = 0
    work: asyncio.Task[dict[int, _A]] | None = None


class Batcher(Generic[_Q, _A]):
    """Coalesces concurrent queries; nobody waits for company, only for a call in flight to end.

    Consumes: queries of one event loop, by ask(). answer: does a batch at once, one answer for each query in
    their order. most: queries of one batch. at_once: batches in flight.
    Waits for: `answer`. Unblocked by: its end; where all who asked have been cancelled, the batch is
    cancelled too. On shutdown: close() cancels what is in flight.
    """

    def __init__(
        self, answer: Callable[[Sequence[_Q]], Awaitable[Sequence[_A]]], *, most: int = 64, at_once: int = 1
    ) -> None:
        self._answer = answer
        self._most = most
        self._room = asyncio.Semaphore(at_once)
        self._filling: _Batch[_Q, _A] | None = None
        self._works: set[asyncio.Task[dict[int, _A]]] = set()

    async def ask(self, query: _Q) -> _A:
        """The answer to one query.

        Raises:
            Exception: whatever its batch raised.
            ToolError: `unavailable`, it was closed meanwhile.
        """
        batch = self._joined()
        work = batch.work
        assert work is not None, "a batch is born with its task"
        number, batch.asked = batch.asked, batch.asked + 1
        batch.queries[number] = query
        try:
            await asyncio.wait([work])
        finally:
            del batch.queries[number]
            if not work.done() and not batch.queries:
                self._no_more_join(batch)
                work.cancel()
                # Whoever asked last leaves only when nothing of the batch is left.
                await asyncio.wait([work])
        if work.cancelled():
            raise ToolError("unavailable", "it was closed while it was asked")
        return work.result()[number]

    async def close(self) -> None:
        """Cancel what is in flight and see it end."""
        for work in self._works:
            work.cancel()
        if self._works:
            await asyncio.wait(self._works)

    def _joined(self) -> _Batch[_Q, _A]:
        batch = self._filling
        if batch is None or batch.asked >= self._most:
            batch = self._filling = _Batch()
            # An empty context: a batch must not live in the context of whoever came first.
            batch.work = asyncio.get_running_loop().create_task(self._served(batch), context=Context())
            self._works.add(batch.work)
            batch.work.add_done_callback(self._ended)
        return batch

    def _ended(self, work: asyncio.Task[dict[int, _A]]) -> None:
        self._works.discard(work)
        # Whoever asked is told; where nobody asks any more, asyncio need not complain.
        if not work.cancelled():
            work.exception()

    def _no_more_join(self, batch: _Batch[_Q, _A]) -> None:
        if self._filling is batch:
            self._filling = None

    async def _served(self, batch: _Batch[_Q, _A]) -> dict[int, _A]:
        async with self._room:
            self._no_more_join(batch)
            queries = dict(batch.queries)
            answers = await self._answer(tuple(queries.values()))
            return dict(zip(queries, answers, strict=True))
