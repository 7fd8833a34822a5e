"""Calls functions of environments and tools, synchronous or not; the event loop waits 3 ms at most."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from agentrl.errors import AgentRLError
from agentrl.runtime.stage import summary_of

MOST_RUNNING_ON = 64
"""The most threads of one name that run on after a cancellation (count): they cannot be ended."""
_GRACE_S = 3e-3
_MOST_SKIPPED = 1024
_F = TypeVar("_F", bound=Callable[..., object])
_T = TypeVar("_T")
_INLINE = "__agentrl_inline__"
_running_on: dict[str, set[threading.Thread]] = {}


class OverrunError(AgentRLError):
    """Too many threads of earlier calls run on, so no other one starts until some of them end."""


def inline(function: _F) -> _F:
    """Promise that a synchronous function returns within microseconds.

    It then runs on the event loop itself, where no deadline can interrupt it; every other synchronous
    tool, reward or grade runs in a thread of its own.

        @inline
        def reward(self, task, answer):
            return float(answer == task.answer)
    """
    vars(function)[_INLINE] = True
    return function


def is_inline(function: Callable[..., object]) -> bool:
    """Whether a function may run on the event loop: it is async, or marked with `inline`."""
    return bool(getattr(function, _INLINE, False)) or inspect.iscoroutinefunction(function)


async def run(work: Callable[[], object], *, thread: str | None) -> object:
    """Call `work` and return its result, awaited where it is awaitable.

    thread: the name of the daemon thread to call it in; None = on the event loop.
    Cancelling it returns at once; the thread then runs on, and its result is dropped.

    Raises:
        Exception: whatever `work` raised.
        OverrunError: `MOST_RUNNING_ON` threads of that name run on.
        RuntimeError: in its thread it raised a BaseException that is no Exception (exit() and the like).
    """
    result = work() if thread is None else await in_thread(work, thread)
    return await result if inspect.isawaitable(result) else result


async def in_thread(work: Callable[[], _T], name: str | None) -> _T:
    """Run `work` in a daemon thread, and return its result as it is; else like `run`.

    Waits for: the thread. Unblocked by: its end, or cancellation. On shutdown: the daemon thread runs on.
    A pool would not do: functions that never return would fill it, and block the exit.
    """
    if name is None:
        return work()
    _check_room(name)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Callable[[], _T]] = loop.create_future()
    context = contextvars.copy_context()
    ended, outcomes = threading.Event(), list[Callable[[], _T]]()

    def settle(outcome: Callable[[], _T]) -> None:
        if not done.done():
            done.set_result(outcome)

    def begin() -> None:
        outcome = outcome_of(lambda: context.run(work), name)
        outcomes.append(outcome)
        ended.set()
        # The loop may be closed by now: then no task waits for this result.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, outcome)

    thread = threading.Thread(target=begin, name=name, daemon=True)
    thread.start()
    if _quick.setdefault(name, _Quick()).awaited(ended):
        return outcomes[0]()
    try:
        return (await done)()
    except asyncio.CancelledError:
        if thread.is_alive():
            _running_on.setdefault(name, set()).add(thread)
        raise


class _Quick:
    """Waits for quick functions on the event loop, which stands still meanwhile, 3 ms at most.

    A thread that computes beside a busy event loop waits 5 ms for the interpreter's lock each time that it
    needs it, and a query of a database needs it a dozen times; its result then waits for the work that the
    loop has queued. Where the loop waits, a query takes as long as it takes alone.

    Functions that take longer are no longer waited for, except for one call in 2, 4, ... 1,024.
    """

    def __init__(self) -> None:
        self._num_skipped = self._skips = 0

    def awaited(self, ended: threading.Event) -> bool:
        """Wait, where it may be worthwhile, and return whether the call has ended."""
        if self._num_skipped < self._skips:
            self._num_skipped += 1
            return False
        self._num_skipped = 0
        if ended.wait(_GRACE_S):
            self._skips //= 4
            return True
        self._skips = min(2 * self._skips + 1, _MOST_SKIPPED)
        return False


_quick: dict[str, _Quick] = {}


def _check_room(name: str) -> None:
    """Forget the threads of this name that have ended; raise OverrunError where too many are left."""
    threads = {thread for thread in _running_on.pop(name, ()) if thread.is_alive()}
    if threads:
        _running_on[name] = threads
    if len(threads) >= MOST_RUNNING_ON:
        raise OverrunError(f"{len(threads)} earlier calls overran their time, and still run")


def outcome_of(work: Callable[[], _T], name: str) -> Callable[[], _T]:
    """Run `work` and return a function that returns its result or raises its exception."""
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  (whatever it raises, exit() included, its caller is waiting)
        cause = error
    else:
        return lambda: result

    def fail() -> _T:
        # A coroutine cannot let StopIteration through.
        if isinstance(cause, Exception) and not isinstance(cause, StopIteration):
            raise cause
        raise RuntimeError(f"{name} failed: {summary_of(cause)}") from cause

    return fail
