"""Synchronous calls that run an event loop, from code that may run one already, as a cell of a notebook does.

    run_coroutine(main)    `asyncio.run`, in the thread of the call
    blocking(call)         the result of `call`; where this thread runs an event loop, in a thread of its own
    awaited(call)          the same for coroutines: the caller's event loop goes on meanwhile
    to_its_end(work, ..)   a coroutine that goes on where a cancellation comes at the wrong moment
    raise_if_cancelled()   ends a task that blocks its event loop in short waits

A `call` that runs in a thread of its own is interrupted from outside: Ctrl-C, or the "interrupt" of a
notebook, in `blocking`; a cancellation in `awaited`. `run_coroutine` then cancels its coroutine, waits until
it has cleaned up, and raises KeyboardInterrupt, as `asyncio.run` does in the main thread.

Such a call has an event loop of its own, since shared resources belong to a loop (`agentrl.tools.shared`),
and so that what a notebook's loop does neither counts for deadlines nor as lag.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TypeVar

T = TypeVar("T")


def raise_if_cancelled() -> None:
    """For code that blocks the event loop: a handler of a signal cancels its task, which does not see that.

    Raises:
        CancelledError: the task that runs was cancelled. Nothing where none runs.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Interruption:
    """Whether a call in another thread is to end, and the tasks there that a request cancels.

    A request cancels every task that runs, and each that begins later. Each further request cancels again:
    a trainer ends its ranks at the second.
    """

    def __init__(self) -> None:
        # A handler of a signal may interrupt itself.
        self._lock = threading.RLock()
        self._tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[object]]] = []
        self.is_requested = False

    def request(self) -> None:
        """End the call; from any thread."""
        with self._lock:
            self.is_requested = True
            for loop, task in self._tasks:
                loop.call_soon_threadsafe(task.cancel)

    @contextmanager
    def cancels(self, task: asyncio.Task[object]) -> Iterator[None]:
        """A block in which requests cancel this task of the running event loop."""
        entry = (asyncio.get_running_loop(), task)
        with self._lock:
            self._tasks.append(entry)
            if self.is_requested:
                task.cancel()
        try:
            yield
        finally:
            # Before the loop closes: a closed one takes no more calls.
            with self._lock:
                self._tasks.remove(entry)


_interruption: ContextVar[Interruption | None] = ContextVar("interruption", default=None)


def run_coroutine(main: Coroutine[None, None, T]) -> T:
    """`asyncio.run`, which the caller of `blocking` or `awaited` may interrupt.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    interruption = _interruption.get()
    return asyncio.run(main) if interruption is None else _interruptible(main, interruption)


def _interruptible(main: Coroutine[None, None, T], interruption: Interruption) -> T:
    async def runs() -> T:
        task = asyncio.current_task()
        assert task is not None, "it runs in a task"
        with interruption.cancels(task):
            return await main

    try:
        return asyncio.run(runs())
    except asyncio.CancelledError:
        if interruption.is_requested:
            raise KeyboardInterrupt from None
        raise


def blocking(call: Callable[[], T]) -> T:
    """The result of `call`, which runs an event loop with `run_coroutine`; this thread waits.

    Ctrl-C in the main thread interrupts the call; this function returns, or raises, when the call has ended
    in good order.

    Raises:
        KeyboardInterrupt: it was interrupted.
        Exception: whatever `call` raised.
    """
    if not _in_event_loop():
        return call()
    interruption = Interruption()
    with _requested_by_ctrl_c(interruption):
        return _started(call, interruption).result()


async def awaited(call: Callable[[], T]) -> T:
    """The result of `call`, which runs an event loop with `run_coroutine`, in a thread and a loop of its own.

    The caller's event loop goes on meanwhile. On cancellation: the call is interrupted, and the cancellation
    takes effect when it has ended in good order.

    Raises:
        Exception: whatever `call` raised.
    """
    interruption = Interruption()
    ended = asyncio.wrap_future(_started(call, interruption))
    cancelled: asyncio.CancelledError | None = None
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError as error:
            cancelled = error
            interruption.request()
    if cancelled is None:
        return ended.result()
    failure = ended.exception()
    raise cancelled from failure if isinstance(failure, Exception) else None


async def to_its_end(
    work: Coroutine[None, None, T], goes_on: Callable[[], bool], on_cancelled: Callable[[], None]
) -> tuple[T, bool]:
    """The result of a coroutine, and whether this task was cancelled meanwhile: the caller raises that later.

    A cancellation cancels the coroutine, unless `goes_on()` is true at that moment; a second one always does.

    Args:
        on_cancelled: called where the coroutine goes on.

    Raises:
        CancelledError: the coroutine was cancelled.
        Exception: whatever it raised.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
        return task.result(), False
    except asyncio.CancelledError:
        if task.done():
            return task.result(), True
        if goes_on():
            on_cancelled()
            # A second cancellation reaches the coroutine.
            return await task, True
        task.cancel()
        await asyncio.wait([task])
        raise


@contextmanager
def _requested_by_ctrl_c(interruption: Interruption) -> Iterator[None]:
    """A block in which Ctrl-C requests the interruption, and nothing else: no exception cuts the wait short.

    A kernel would raise KeyboardInterrupt here, and `asyncio.run` cancel a task of this thread.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: interruption.request())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _started(call: Callable[[], T], interruption: Interruption) -> Future[T]:
    """The call in a thread of its own, with the caller's context variables: a notebook's say which cell's
    output it is."""
    context = copy_context()
    context.run(_interruption.set, interruption)
    threads = ThreadPoolExecutor(1, "agentrl")
    future = threads.submit(context.run, call)
    threads.shutdown(wait=False)
    return future


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
