"""Calls functions of environments and tools, synchronous or not, without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from agentrl.errors import AgentRLError

MOST_RUNNING_ON = 64
"""The most threads of one name that run on after a cancellation (count): they cannot be ended."""
_F = TypeVar("_F", bound=Callable[..., object])
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
    result = work() if thread is None else await _in_thread(work, thread)
    return await result if inspect.isawaitable(result) else result


async def _in_thread(work: Callable[[], object], name: str) -> object:
    """Run `work` in a daemon thread.

    Waits for: the thread. Unblocked by: its end, or cancellation. On shutdown: the daemon thread runs on.
    A pool would not do: functions that never return would fill it, and block the exit.
    """
    _check_room(name)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Callable[[], object]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(outcome: Callable[[], object]) -> None:
        if not done.done():
            done.set_result(outcome)

    def begin() -> None:
        outcome = outcome_of(lambda: context.run(work), name)
        # The loop may be closed by now: then no task waits for this result.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, outcome)

    thread = threading.Thread(target=begin, name=name, daemon=True)
    thread.start()
    try:
        return (await done)()
    except asyncio.CancelledError:
        if thread.is_alive():
            _running_on.setdefault(name, set()).add(thread)
        raise


def _check_room(name: str) -> None:
    """Forget the threads of this name that have ended; raise OverrunError where too many are left."""
    threads = {thread for thread in _running_on.pop(name, ()) if thread.is_alive()}
    if threads:
        _running_on[name] = threads
    if len(threads) >= MOST_RUNNING_ON:
        raise OverrunError(f"{len(threads)} earlier calls overran their time, and still run")


def outcome_of(work: Callable[[], object], name: str) -> Callable[[], object]:
    """Run `work` and return a function that returns its result or raises its exception."""
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  (whatever it raises, exit() included, its caller is waiting)
        cause = error
    else:
        return lambda: result

    def fail() -> object:
        # A coroutine cannot let StopIteration through.
        if isinstance(cause, Exception) and not isinstance(cause, StopIteration):
            raise cause
        raise RuntimeError(f"{name} raised {type(cause).__name__}") from cause

    return fail
