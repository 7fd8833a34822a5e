"""A persistent worker thread: for calls of a millisecond, a new thread each would be half of the cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from agentrl.tools.running import outcome_of

_T = TypeVar("_T")
_Job: TypeAlias = Callable[[], Callable[[], None]]
"""Does the work; returns the function that reports the outcome to the event loop."""


class WorkerThread:
    """Runs the calls of one event loop in a daemon thread, one at a time.

    Consumes: functions, by call(). Waits for: their end. Unblocked by: cancellation. A thread that is still
    busy when the next call comes is abandoned, ends when its function returns, and is replaced by a new one:
    a function that never returns blocks no other call. On shutdown: close().
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: _Thread | None = None

    async def call(self, work: Callable[[], _T]) -> _T:
        """The result of `work`.

        Raises:
            Exception: whatever it raised.
            RuntimeError: it raised a BaseException that is no Exception (exit() and the like).
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Callable[[], _T]] = loop.create_future()

        def job() -> Callable[[], None]:
            return partial(_report, loop, done, outcome_of(work, self._name))

        self._idle_thread().do(job)
        outcome = await done
        return outcome()

    def close(self) -> None:
        """Let the thread end after its current job."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _idle_thread(self) -> _Thread:
        if self._thread is not None and self._thread.busy:
            self.close()
        if self._thread is None:
            self._thread = _Thread(self._name)
        return self._thread


class _Thread:
    """A daemon thread and its jobs. busy: its last job has not ended yet."""

    def __init__(self, name: str) -> None:
        self.busy = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, job: _Job) -> None:
        self.busy = True
        self._jobs.put(job)

    def end(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            report = job()
            self.busy = False  # before the report: the caller may send the next job at once
            report()


def _report(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Callable[[], _T]],
    outcome: Callable[[], _T],
) -> None:
    # The loop may be closed by now: then no task waits for this outcome.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, done, outcome)


def _settle(done: asyncio.Future[Callable[[], _T]], outcome: Callable[[], _T]) -> None:
    if not done.done():
        done.set_result(outcome)
