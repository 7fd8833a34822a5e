"""Batches concurrent queries: of one client, as they arrive; of many clients, in turn."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
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


@dataclass(eq=False)
class _Job(Generic[_Q, _A]):
    """The queries of one request. taken: how many have been in a batch. done: all answered, or one failed."""

    client: str
    queries: Sequence[_Q]
    done: asyncio.Future[None]
    taken: int = 0
    answers: dict[int, _A] = field(default_factory=dict)

    def add(self, number: int, answer: _A) -> None:
        self.answers[number] = answer
        if len(self.answers) == len(self.queries) and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class FairQueue(Generic[_Q, _A]):
    """Answers requests of many clients: their queries take turns, however many each client has sent.

    A batch has one query of each client, then a second one of each; the requests of a client take turns,
    too. A query that fails is a failure of its own request.

    Consumes: requests of one event loop, by submit(). answer: processes a batch; returns the answers of its
    first queries, at least one, and leaves the others for the next batch. max_batch: queries of one batch.
    max_waiting: queries of one client.
    Waits for: `answer`. Unblocked by: its end; a request whose caller is cancelled leaves the queue. On
    shutdown: close() cancels the batch in flight.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[_Q]], Awaitable[Sequence[_A]]],
        *,
        max_batch: int = 64,
        max_waiting: int = 8192,
    ) -> None:
        self._answer = answer
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._clients: OrderedDict[str, deque[_Job[_Q, _A]]] = OrderedDict()
        self._waiting: Counter[str] = Counter()
        self._work: asyncio.Task[None] | None = None

    async def submit(self, client: str, queries: Sequence[_Q]) -> list[_A]:
        """The answers to the queries of one request, in their order.

        Raises:
            Exception: whatever `answer` raised for one of them.
            ToolError: `unavailable`, too many queries of the client wait, or the queue was closed meanwhile.
        """
        if self._waiting[client] + len(queries) > self._max_waiting:
            raise ToolError("unavailable", f"{self._waiting[client]:,} queries of this client wait already")
        loop = asyncio.get_running_loop()
        job = _Job[_Q, _A](client, queries, loop.create_future())
        self._clients.setdefault(client, deque()).append(job)
        self._waiting[client] += len(queries)
        if self._work is None or self._work.done():
            # An empty context: the task must not keep the context variables of its first caller.
            self._work = loop.create_task(self._run(), context=Context())
        try:
            await job.done
        finally:
            self._waiting[client] -= len(queries)
            self._waiting += Counter()  # drops clients without queries
        return [job.answers[number] for number in range(len(queries))]

    async def close(self) -> None:
        """Cancel the batch in flight, and fail the requests that wait."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])

    async def _run(self) -> None:
        batch: list[tuple[_Job[_Q, _A], int]] = []
        try:
            while batch := self._take():
                await self._process(batch)
        finally:
            for job in [
                *(job for job, _ in batch),
                *(job for jobs in self._clients.values() for job in jobs),
            ]:
                job.fail(ToolError("unavailable", "the queue was closed"))
            self._clients.clear()

    async def _process(self, batch: Sequence[tuple[_Job[_Q, _A], int]]) -> None:
        work = asyncio.ensure_future(self._answer([job.queries[number] for job, number in batch]))
        try:
            await asyncio.wait([work])
        finally:
            work.cancel()
        error = work.exception()
        if error is None:
            answers = work.result()
            assert answers, "`answer` returns at least one answer"
            for (job, number), answer in zip(batch, answers, strict=False):
                job.add(number, answer)
            self._put_back(batch[len(answers) :])
        elif len(batch) == 1:
            batch[0][0].fail(error)
        else:
            for entry in batch:
                await self._process([entry])

    def _take(self) -> list[tuple[_Job[_Q, _A], int]]:
        """The next batch: of each client in turn one query, as (request, number of the query)."""
        batch: list[tuple[_Job[_Q, _A], int]] = []
        while self._clients and len(batch) < self._max_batch:
            client, jobs = self._clients.popitem(last=False)
            while jobs and jobs[0].done.done():
                jobs.popleft()
            if jobs:
                job = jobs.popleft()
                batch.append((job, job.taken))
                job.taken += 1
                if job.taken < len(job.queries):
                    jobs.append(job)
            if jobs:
                self._clients[client] = jobs
        return batch

    def _put_back(self, entries: Sequence[tuple[_Job[_Q, _A], int]]) -> None:
        """Return queries to the queue: they are the next ones, in their order."""
        for job, number in reversed(entries):
            jobs = self._clients.setdefault(job.client, deque())
            if job in jobs:
                jobs.remove(job)
            jobs.appendleft(job)
            job.taken = number
            self._clients.move_to_end(job.client, last=False)
