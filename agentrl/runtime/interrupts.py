"""Ctrl-C, SIGTERM and SIGHUP end a program in the same way, and in order.

In an event loop of `run_until_signal` the first signal cancels the work, and a second one breaks off the
cleanup. Elsewhere a signal ends the program at once. Exit codes are those of a shell: 128 + the signal's
number. SIGHUP, which a terminal sends when it closes, stays ignored where `nohup` has set it so.
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

from agentrl.runtime.event_loop import run_coroutine

T = TypeVar("T")

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 + 2."""
_SIGNALLED: Final = 128


class SignalExit(SystemExit):
    """SIGTERM or SIGHUP ends the program, wherever it is; exit() of a user's code is an error of it."""


def run_until_signal(main: Coroutine[None, None, T]) -> T:
    """`run_coroutine`, in which SIGTERM and SIGHUP cancel the coroutine as Ctrl-C does.

    Signals reach the main thread alone: in another thread none has an effect.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        SystemExit: SIGTERM or SIGHUP; its code is 143 or 129.
    """
    received: list[int] = []
    results: list[T] = []

    async def runs() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "it runs in a task"

        def cancel(number: int, frame: FrameType | None) -> None:
            # When a terminal closes, both the kernel and the shell send SIGHUP: the second one is the same.
            if received and number == signal.SIGHUP:
                return
            if received:
                _exit(number, frame)
            received.append(number)
            task.cancel()
            # The selector may be waiting for an event, which this is.
            loop.call_soon_threadsafe(lambda: None)

        with _on_signals(cancel):
            # Not returned: `asyncio.run` ends by reading the handler of SIGINT, and `signal` makes a text of
            # that and of the task's result, which may hold every token of a run.
            results.append(await main)

    try:
        run_coroutine(runs())
        return results[0]
    except asyncio.CancelledError:
        if received:
            sys.exit(_SIGNALLED + received[0])
        raise


@contextmanager
def exits_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit in the block, as Ctrl-C raises KeyboardInterrupt: 143 and 129."""
    with _on_signals(_exit):
        yield


def _exit(number: int, frame: FrameType | None) -> None:
    del frame
    raise SignalExit(_SIGNALLED + number)


@contextmanager
def _on_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """SIGTERM and SIGHUP call the handler in the block, and afterwards what they called before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in before:
            # None = a handler that is not Python's, which cannot be restored.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
