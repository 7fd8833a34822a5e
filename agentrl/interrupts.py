"""Ctrl-C and SIGTERM end a program in the same way, and in order.

In an event loop of `run_until_signal` the first signal cancels the work, and a second one breaks off the
cleanup. Elsewhere a signal ends the program at once. Exit codes are those of a shell: 128 + the signal's
number.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, TypeVar

from agentrl.event_loop import run_coroutine

T = TypeVar("T")

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + 2."""
TERMINATED: Final = 143
"""Exit code after SIGTERM: 128 + 15."""


def run_until_signal(main: Coroutine[None, None, T]) -> T:
    """`run_coroutine`, in which SIGTERM cancels the coroutine as Ctrl-C does.

    Signals reach the main thread alone: in another thread neither has an effect.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        SystemExit: SIGTERM; its code is 143.
    """
    was_terminated = False
    results: list[T] = []

    async def runs() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "it runs in a task"

        def cancel(number: int, frame: FrameType | None) -> None:
            nonlocal was_terminated
            if was_terminated:
                _exit(number, frame)
            was_terminated = True
            task.cancel()
            # The selector may be waiting for an event, which this is.
            loop.call_soon_threadsafe(lambda: None)

        with _on_sigterm(cancel):
            # Not returned: `asyncio.run` ends by reading the handler of SIGINT, and `signal` makes a text of
            # that and of the task's result, which may hold every token of a run.
            results.append(await main)

    try:
        run_coroutine(runs())
        return results[0]
    except asyncio.CancelledError:
        if was_terminated:
            sys.exit(TERMINATED)
        raise


@contextmanager
def exits_on_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit in the block, with the code 143, as Ctrl-C raises KeyboardInterrupt."""
    with _on_sigterm(_exit):
        yield


def _exit(number: int, frame: FrameType | None) -> None:
    del number, frame
    sys.exit(TERMINATED)


@contextmanager
def _on_sigterm(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGTERM calls the handler in the block, and afterwards what it called before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        # None = a handler that is not Python's, which cannot be restored.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
