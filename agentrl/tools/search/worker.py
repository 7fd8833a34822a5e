"""A thread that stays: for calls of a millisecond, starting one each time would be half of the cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias, TypeVar, cast

from agentrl.tools.running import outcome_of

_T = TypeVar("_T")
_Job: TypeAlias = Callable[[], Callable[[], None]]
"""Does the work and returns what tells of it."""


class WorkerThread:
    """Does the calls of one event loop in a daemon thread, one at a time.

    Consumes: functions, by call(). Waits for: their end. Unblocked by: cancellation. A thread that is still
    busy when the next call comes is left to itself, to end when it can, and a new one takes its place: a
    function that never returns is in nobody's way. On shutdown: close().
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: _Thread | None = None

    async def call(self, work: Callable[[], _T]) -> _T:
        """What `work` returns.

        Raises:
            Exception: whatever it raised.
            RuntimeError: what it raised was no Exception (exit() and the like).
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Callable[[], object]] = loop.create_future()

        def job() -> Callable[[], None]:
            return partial(_tell, loop, done, outcome_of(work, self._name))

        self._free().do(job)
        outcome = await done
        return cast(_T, outcome())

    def close(self) -> None:
        """Let the thread end, after what it does now."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _free(self) -> _Thread:
        if self._thread is not None and self._thread.busy:
            self.close()
        if self._thread is None:
            self._thread = _Thread(self._name)
        return self._thread


class _Thread:
    """A daemon thread and its jobs. busy: it has not yet come to the end of the last one."""

    def __init__(self, name: str) -> None:
        self.busy = False
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._work_off, name=name, daemon=True).start()

    def do(self, job: _Job) -> None:
        self.busy = True
        self._jobs.put(job)

    def end(self) -> None:
        self._jobs.put(None)

    def _work_off(self) -> None:
        while (job := self._jobs.get()) is not None:
            tell = job()
            self.busy = False  # before anybody is told and comes with the next
            tell()


def _tell(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Callable[[], object]],
    outcome: Callable[[], object],
) -> None:
    # The loop may be closed by now: then nobody waits for this outcome.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, done, outcome)


def _settle(done: asyncio.Future[Callable[[], object]], outcome: Callable[[], object]) -> None:
    if not done.done():
        done.set_result(outcome)
