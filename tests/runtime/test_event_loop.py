"""Calls that run an event loop: from code without one, from a notebook's, and as coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
import time

import pytest

from agentrl.runtime.event_loop import awaited, blocking, run_coroutine

LABEL = contextvars.ContextVar("label", default="none")
PATIENCE_S = 10


class Work:
    """A call that waits until it is cancelled, and cleans up in `seconds`, or until it is cancelled again."""

    def __init__(self, seconds=0.05, failure=None):
        self.seconds, self.failure = seconds, failure
        self.begun, self.events = threading.Event(), []

    async def main(self):
        try:
            self.begun.set()
            await asyncio.sleep(PATIENCE_S)
        finally:
            try:
                await asyncio.sleep(self.seconds)
            except asyncio.CancelledError:
                self.events.append("cut short")
            if self.failure:
                raise self.failure
            self.events.append("in good order")

    def __call__(self):
        try:
            return run_coroutine(self.main())
        except KeyboardInterrupt:
            self.events.append("interrupted")
            raise


async def number():
    await asyncio.sleep(0)
    return threading.get_ident()


async def failing():
    raise LookupError("no such thing")


def in_notebook(call):
    """The call in a loop that leaves SIGINT alone, as the loop of a notebook's kernel does."""

    async def cell():
        return call()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def ctrl_c_after(work, *seconds):
    """Press Ctrl-C so long after the call has begun, and after each other."""

    def press():
        assert work.begun.wait(PATIENCE_S)
        for wait_s in seconds:
            time.sleep(wait_s)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


def test_without_a_loop_the_call_stays_in_its_thread():
    assert blocking(lambda: run_coroutine(number())) == threading.get_ident()


@pytest.mark.parametrize("runner", [in_notebook, lambda call: asyncio.run(as_coroutine(call))])
def test_where_a_loop_runs_the_call_has_a_thread_and_a_loop_of_its_own(runner):
    LABEL.set("of the cell")
    assert runner(lambda: blocking(lambda: run_coroutine(number()))) != threading.get_ident()
    assert runner(lambda: blocking(LABEL.get)) == "of the cell"
    with pytest.raises(LookupError, match="no such thing"):
        runner(lambda: blocking(lambda: run_coroutine(failing())))
    for thread in threading.enumerate():
        if thread.name.startswith("agentrl_"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


async def as_coroutine(call):
    return call()


async def test_the_twin_leaves_the_loop_free():
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    assert await awaited(lambda: run_coroutine(number())) != threading.get_ident()
    await awaited(lambda: time.sleep(0.1))
    ticking.cancel()
    assert ticks > 10
    with pytest.raises(LookupError):
        await awaited(lambda: run_coroutine(failing()))


@pytest.mark.parametrize("runner", [in_notebook, lambda call: asyncio.run(as_coroutine(call))])
def test_ctrl_c_ends_the_call_in_good_order(runner):
    work, before = Work(), signal.getsignal(signal.SIGINT)
    pressing = ctrl_c_after(work, 0.02)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runner(lambda: blocking(work))
    pressing.join()
    assert work.events == ["in good order", "interrupted"]
    assert time.monotonic() - began < PATIENCE_S / 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_cancels_again():
    work = Work(seconds=PATIENCE_S)
    ctrl_c_after(work, 0.02, 0.1)
    with pytest.raises(KeyboardInterrupt):
        in_notebook(lambda: blocking(work))
    assert work.events == ["cut short", "in good order", "interrupted"]


def test_what_goes_wrong_while_it_ends_is_raised():
    work = Work(failure=OSError("the disk is full"))
    ctrl_c_after(work, 0.02)
    with pytest.raises(OSError, match="disk is full"):
        in_notebook(lambda: blocking(work))


async def test_a_cancelled_twin_ends_in_good_order_first():
    work = Work()
    task = asyncio.create_task(awaited(work))
    assert await asyncio.to_thread(work.begun.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.events == ["in good order", "interrupted"]


async def test_a_deadline_ends_the_twin():
    work = Work()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await awaited(work)
    assert work.events == ["in good order", "interrupted"]


async def test_a_cancellation_has_the_failure_of_the_end_as_its_cause():
    work = Work(failure=OSError("the disk is full"))
    task = asyncio.create_task(awaited(work))
    assert await asyncio.to_thread(work.begun.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert isinstance(cancelled.value.__cause__, OSError)


async def test_a_cancellation_before_the_loop_runs_ends_the_call_when_it_does():
    released, works = threading.Event(), Work()

    def call():
        released.wait(PATIENCE_S)
        return works()

    task = asyncio.create_task(awaited(call))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.01)
    released.set()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < PATIENCE_S / 2
