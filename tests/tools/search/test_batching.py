"""Batches of concurrent queries, and the persistent worker thread."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from agentrl.errors import ToolError
from agentrl.tools.search.batching import Batcher, FairQueue
from agentrl.tools.search.worker import WorkerThread


class Slow:
    """Answers batches when its gate opens; records their queries."""

    def __init__(self):
        self.batches = []
        self.go = asyncio.Event()
        self.ended = 0

    async def __call__(self, queries):
        self.batches.append(queries)
        try:
            await self.go.wait()
        finally:
            await asyncio.sleep(0.01)  # closing takes a while
            self.ended += 1
        if "break" in queries:
            raise ToolError("crashed", "as asked")
        return [query.upper() for query in queries]


async def asking(batcher, *queries):
    tasks = [asyncio.create_task(batcher.submit(query)) for query in queries]
    await asyncio.sleep(0.01)
    return tasks


async def test_a_query_never_waits_for_others_and_queries_during_a_call_share_a_batch():
    slow = Slow()
    batcher = Batcher(slow, max_batch=3)
    tasks = [
        *await asking(batcher, "a"),
        *await asking(batcher, "b", "c"),
        *await asking(batcher, "d", "e", "f"),
    ]
    assert slow.batches == [("a",)]
    slow.go.set()
    assert await asyncio.gather(*tasks) == list("ABCDEF")
    assert slow.batches == [("a",), ("b", "c", "d"), ("e", "f")]


async def test_several_batches_go_at_once_where_they_may():
    slow = Slow()
    batcher = Batcher(slow, max_in_flight=2)
    tasks = [task for query in "abcd" for task in await asking(batcher, query)]
    assert slow.batches == [("a",), ("b",)]
    slow.go.set()
    assert await asyncio.gather(*tasks) == list("ABCD")


async def test_a_failure_reaches_all_of_its_batch_and_no_other():
    slow = Slow()
    batcher = Batcher(slow)
    tasks = [*await asking(batcher, "a"), *await asking(batcher, "break", "b")]
    slow.go.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes[0] == "A"
    assert [str(outcome) for outcome in outcomes[1:]] == ["tool crashed: as asked"] * 2
    assert await batcher.submit("c") == "C"


async def test_a_batch_without_a_waiting_caller_is_cancelled():
    slow = Slow()
    batcher = Batcher(slow)
    tasks = await asking(batcher, "a", "b")
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    assert slow.ended == 0
    tasks[1].cancel()
    await asyncio.wait(tasks, timeout=5)
    assert tasks[1].cancelled()
    assert slow.ended == 1
    slow.go.set()
    assert await batcher.submit("c") == "C"
    assert len(asyncio.all_tasks()) == 1


async def test_a_query_cancelled_while_waiting_is_never_sent():
    slow = Slow()
    batcher = Batcher(slow)
    first, *others = [*await asking(batcher, "a"), *await asking(batcher, "b", "c")]
    others[0].cancel()
    await asyncio.sleep(0)
    slow.go.set()
    await asyncio.wait([first, *others])
    assert slow.batches == [("a",), ("c",)]
    assert others[1].result() == "C"


async def test_closing_raises_in_waiting_callers():
    slow = Slow()
    batcher = Batcher(slow)
    tasks = await asking(batcher, "a")
    await batcher.close()
    with pytest.raises(ToolError, match="closed while it was asked"):
        await tasks[0]
    assert slow.ended == 1


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "worker"]


async def gone():
    for _ in range(100):
        if not threads():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(threads())


async def test_a_worker_keeps_one_thread_and_hands_on_what_breaks():
    worker = WorkerThread("worker")
    idents = {await worker.call(threading.get_ident) for _ in range(20)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 // 0)
    with pytest.raises(RuntimeError, match="SystemExit"):
        await worker.call(sys.exit)
    assert await worker.call(threading.get_ident) in idents
    worker.close()
    await gone()


async def test_a_function_that_never_returns_blocks_no_other_call():
    worker, release = WorkerThread("worker"), threading.Event()
    hanging = asyncio.create_task(worker.call(release.wait))
    await asyncio.sleep(0.01)
    hanging.cancel()
    await asyncio.wait([hanging])
    try:
        async with asyncio.timeout(5):
            assert await worker.call(lambda: "done") == "done"
    finally:
        release.set()
        worker.close()
    await gone()


class Recorded:
    """Answers the first `limit` queries of a batch, in capitals; records the batches."""

    def __init__(self, limit=64):
        self.limit = limit
        self.batches = []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, queries):
        self.batches.append(list(queries))
        await self.go.wait()
        if "break" in queries:
            raise ValueError("as asked")
        return [query.upper() for query in queries[: self.limit]]


async def submitted(queue, *requests):
    tasks = [asyncio.create_task(queue.submit(client, queries)) for client, queries in requests]
    await asyncio.sleep(0.01)
    return tasks


async def test_queries_of_many_clients_take_turns_however_many_each_has_sent():
    answer = Recorded()
    answer.go.clear()
    queue = FairQueue(answer, max_batch=4)
    tasks = await submitted(queue, ("first", ["x"]))
    tasks += await submitted(queue, ("a", [f"a{n}" for n in range(6)]), ("a", ["other"]), ("b", ["b0", "b1"]))
    answer.go.set()
    results = await asyncio.gather(*tasks)
    assert results == [["X"], [f"A{n}" for n in range(6)], ["OTHER"], ["B0", "B1"]]
    # The requests of one client take turns, too.
    assert answer.batches == [["x"], ["a0", "b0", "other", "b1"], ["a1", "a2", "a3", "a4"], ["a5"]]
    await queue.close()


async def test_queries_that_a_batch_leaves_are_the_next_in_their_order():
    answer = Recorded(limit=1)
    queue = FairQueue(answer, max_batch=3)
    requests = [("a", ["a0", "a1", "a2"]), ("b", ["b0"]), ("a", ["z0", "z1"])]
    results = await asyncio.gather(*await submitted(queue, *requests))
    assert results == [["A0", "A1", "A2"], ["B0"], ["Z0", "Z1"]]
    assert [batch[0] for batch in answer.batches] == ["a0", "b0", "z0", "a1", "z1", "a2"]
    await queue.close()


async def test_a_query_that_fails_fails_its_own_request():
    answer = Recorded()
    answer.go.clear()
    queue = FairQueue(answer)
    tasks = await submitted(queue, ("first", ["x"]))
    tasks += await submitted(queue, ("a", ["ok", "break", "later"]), ("a", ["fine"]), ("b", ["good", "too"]))
    answer.go.set()
    first, broken, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first, others) == (["X"], [["FINE"], ["GOOD", "TOO"]])
    assert str(broken) == "as asked"
    assert await queue.submit("a", ["again"]) == ["AGAIN"]
    await queue.close()


async def test_what_a_client_has_waiting_is_bounded_and_leaves_with_it():
    answer = Recorded()
    answer.go.clear()
    queue = FairQueue(answer, max_batch=1, max_waiting=4)
    (first,) = await submitted(queue, ("a", ["one"]))
    (left,) = await submitted(queue, ("a", ["two", "three"]))
    with pytest.raises(ToolError, match="3 queries of this client wait already"):
        await queue.submit("a", ["four", "five"])
    left.cancel()
    await asyncio.wait([left])
    others = await submitted(queue, ("a", ["four", "five"]), ("b", ["six"]))
    answer.go.set()
    assert await asyncio.gather(first, *others) == [["ONE"], ["FOUR", "FIVE"], ["SIX"]]
    assert answer.batches == [["one"], ["four"], ["six"], ["five"]]
    assert queue._waiting == {}
    await queue.close()


async def test_closing_fails_what_waits():
    answer = Recorded()
    answer.go.clear()
    queue = FairQueue(answer, max_batch=1)
    tasks = await submitted(queue, ("a", ["one"]), ("b", ["two"]))
    await queue.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["tool unavailable: the queue was closed"] * 2
