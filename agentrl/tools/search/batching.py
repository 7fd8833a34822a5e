"""Batches concurrent queries: those that arrive while a call runs form the next batch."""

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
    """The queries of one batch, by the number of their caller. work: the answers, by the same numbers."""

    queries: dict[int, _Q] = field(default_factory=dict)
    size: int = 0
    work: asyncio.Task[dict[int, _A]] | None = None


class Batcher(Generic[_Q, _A]):
    """Coalesces concurrent queries. A query waits only for the batches in flight, never for other queries.

    Consumes: queries of one event loop, by submit(). answer: processes a batch, one answer for each query in
    their order. max_batch: queries of one batch. max_in_flight: batches at a time.
    Waits for: `answer`. Unblocked by: its end; when all callers of a batch are cancelled, the batch is
    cancelled, too. On shutdown: close() cancels the batches in flight.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[_Q]], Awaitable[Sequence[_A]]],
        *,
        max_batch: int = 64,
        max_in_flight: int = 1,
    ) -> None:
        self._answer = answer
        self._max_batch = max_batch
        self._in_flight = asyncio.Semaphore(max_in_flight)
        self._open_batch: _Batch[_Q, _A] | None = None
        self._works: set[asyncio.Task[dict[int, _A]]] = set()

    async def submit(self, query: _Q) -> _A:
        """The answer to one query.

        Raises:
            Exception: whatever its batch raised.
            ToolError: `unavailable`, the batcher was closed meanwhile.
        """
        batch = self._next_batch()
        work = batch.work
        assert work is not None, "a batch is created with its task"
        number, batch.size = batch.size, batch.size + 1
        batch.queries[number] = query
        try:
            await asyncio.wait([work])
        finally:
            del batch.queries[number]
            if not work.done() and not batch.queries:
                self._seal(batch)
                work.cancel()
                # The last caller returns only after the task of the batch has ended.
                await asyncio.wait([work])
        if work.cancelled():
            raise ToolError("unavailable", "it was closed while it was asked")
        return work.result()[number]

    async def close(self) -> None:
        """Cancel the batches in flight and wait for their end."""
        for work in self._works:
            work.cancel()
        if self._works:
            await asyncio.wait(self._works)

    def _next_batch(self) -> _Batch[_Q, _A]:
        batch = self._open_batch
        if batch is None or batch.size >= self._max_batch:
            batch = self._open_batch = _Batch()
            # An empty context: a batch must not keep the context variables of its first caller.
            batch.work = asyncio.get_running_loop().create_task(self._run(batch), context=Context())
            self._works.add(batch.work)
            batch.work.add_done_callback(self._ended)
        return batch

    def _ended(self, work: asyncio.Task[dict[int, _A]]) -> None:
        self._works.discard(work)
        # submit() raises its exception; without a caller, asyncio would log it as never retrieved.
        if not work.cancelled():
            work.exception()

    def _seal(self, batch: _Batch[_Q, _A]) -> None:
        if self._open_batch is batch:
            self._open_batch = None

    async def _run(self, batch: _Batch[_Q, _A]) -> dict[int, _A]:
        async with self._in_flight:
            self._seal(batch)
            queries = dict(batch.queries)
            answers = await self._answer(tuple(queries.values()))
            return dict(zip(queries, answers, strict=True))
