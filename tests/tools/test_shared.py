"""Shared resources are opened once and closed once, both in the same task."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from contextvars import ContextVar

import pytest

from agentrl.errors import ToolError
from agentrl.tools import Held, Shared, release_shared

where: ContextVar[str] = ContextVar("where", default="nowhere")


class Life:
    """A context manager that records its calls."""

    def __init__(self, opens=None, fails: bool = False) -> None:
        self.events: list[str] = []
        self.tasks: list[asyncio.Task] = []
        self.opens = opens
        self.fails = fails

    @asynccontextmanager
    async def open(self):
        self.tasks.append(asyncio.current_task())
        self.events.append(f"opening in {where.get()}")
        if self.opens is not None:
            await self.opens.wait()
        if self.fails:
            raise OSError("no such thing")
        try:
            yield object()
        finally:
            self.tasks.append(asyncio.current_task())
            self.events.append("closed")


async def test_one_task_opens_and_closes_it_for_all_callers():
    life = Life()
    where.set("an episode")
    held = Held(life.open(), "thing")
    first = await asyncio.create_task(held.value())
    assert await asyncio.create_task(held.value()) is first
    assert not held.over
    await asyncio.create_task(held.close())
    await held.close()
    assert held.over
    assert life.events == ["opening in nowhere", "closed"]
    assert life.tasks[0] is life.tasks[1]


async def test_a_waiter_may_be_cancelled_and_the_others_get_the_value():
    gate = asyncio.Event()
    life = Life(opens=gate)
    shared = Shared(life.open, "thing")
    waiting = [asyncio.create_task(shared.get()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    gate.set()
    second, third = await asyncio.gather(*waiting[1:])
    assert second is third
    assert waiting[0].cancelled()
    await release_shared()
    assert life.events == ["opening in nowhere", "closed"]


async def test_a_failed_opening_is_raised_to_all_waiters_and_tried_again():
    life = Life(fails=True)
    shared = Shared(life.open, "thing")
    outcomes = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["no such thing"] * 2
    life.fails = False
    assert await shared.get() is not None
    assert life.events == ["opening in nowhere"] * 2
    await release_shared()


async def test_closing_what_still_opens_ends_it():
    life = Life(opens=asyncio.Event())
    held = Held(life.open(), "thing")
    waiting = asyncio.create_task(held.value())
    await asyncio.sleep(0)
    await held.close()
    with pytest.raises(ToolError, match="closed while it was opening"):
        await waiting


async def test_what_closing_raises_is_raised_by_close():
    @asynccontextmanager
    async def breaks():
        yield 1
        raise OSError("stuck")

    held = Held(breaks(), "thing")
    await held.value()
    with pytest.raises(OSError, match="stuck"):
        await held.close()


async def test_after_a_drop_it_opens_again_and_a_stale_drop_has_no_effect():
    life = Life()
    shared = Shared(life.open, "thing")
    first = await shared.get()
    await shared.drop(first)
    second = await shared.get()
    assert second is not first
    await shared.drop(first)
    assert await shared.get() is second
    await release_shared()
    assert life.events.count("closed") == 2


def test_the_end_of_the_loop_closes_it_and_the_next_loop_opens_another():
    life = Life()
    shared = Shared(life.open, "thing")
    first, second = asyncio.run(shared.get()), asyncio.run(shared.get())
    assert first is not second
    assert life.events == ["opening in nowhere", "closed"] * 2
