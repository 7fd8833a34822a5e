"""A thread that stays: for calls of a millisecond, starting one each time would be half of the cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeAlias, TypeVar, cast

from agentrl.tools.running import outcome_of

_T = TypeVar("_T")
_Job: TypeAlias = Callable[[], None] | None


class Worker:
    """Does the calls of one event loop in a daemon thread, one after another.

    Consumes: functions, by call(). Waits for: their end. Unblocked by: cancellation, which leaves the thread
    to itself (it ends with what it does) and lets the next call have a new one. On shutdown: close().
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job] | None = None

    async def call(self, work: Callable[[], _T]) -> _T:
        """What `work` returns.

        Raises:
            Exception: whatever it raised.
            RuntimeError: what it raised was no Exception (exit() and the like).
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Callable[[], object]] = loop.create_future()

        def job() -> None:
            outcome = outcome_of(work, self._name)
            # The loop may be closed by now: then nobody waits for this result.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, done, outcome)

        self._thread().put(job)
        try:
            outcome = await done
        except asyncio.CancelledError:
            self.close()
            raise
        return cast(_T, outcome())

    def close(self) -> None:
        """Let the thread end."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _thread(self) -> SimpleQueue[_Job]:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_work_off, args=(self._jobs,), name=self._name, daemon=True).start()
        return self._jobs


def _work_off(jobs: SimpleQueue[_Job]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _settle(done: asyncio.Future[Callable[[], object]], outcome: Callable[[], object]) -> None:
    if not done.done():
        done.set_result(outcome)
