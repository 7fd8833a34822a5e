"""Checks that a cancellation at any await leaves nothing open.

The expert (or random play, where there is none) is played and cancelled at its first await, its second,
and so on, until an episode completes. An await is a suspension of the episode's own task or of any task
that it has started: they are counted by wrapping every coroutine that becomes a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from agentrl.envs.check.arena import Arena, Policy, outcome
from agentrl.envs.check.findings import LEAVES, Finding, ProbeResult, error
from agentrl.envs.check.traces import Trace, leftovers, own_temporary_folder, present
from agentrl.types import Episode

MOST_CANCELS = 400

T = TypeVar("T")


@dataclass(slots=True)
class _Counting:
    """Counts suspensions and cancels the episode at number `at`. where: the code that was suspended there."""

    at: int
    count: int = 0
    where: str = ""
    cancelled: bool = False
    episode: asyncio.Task[Episode | str] | None = None

    def suspended(self, coroutine: object) -> None:
        """Count a suspension of a task of this episode."""
        self.count += 1
        if self.count == self.at and self.episode is not None:
            self.where = _innermost(coroutine)
            # Not here: the suspending task is not yet registered with the future that it waits for.
            asyncio.get_running_loop().call_soon(self._cancel, self.episode)

    def _cancel(self, episode: asyncio.Task[Episode | str]) -> None:
        self.cancelled = episode.cancel()


class _Counted(Generator[object, object, T]):
    """Wraps a coroutine and reports each of its suspensions."""

    def __init__(self, coroutine: Coroutine[object, object, T], counting: _Counting) -> None:
        self._coroutine = coroutine
        self._counting = counting

    def __await__(self) -> Generator[object, object, T]:
        return self

    def send(self, value: object, /) -> object:
        waits_for = self._coroutine.send(value)
        self._counting.suspended(self._coroutine)
        return waits_for

    def throw(
        self,
        type_or_error: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
        /,
    ) -> object:
        del value, traceback
        waits_for = self._coroutine.throw(type_or_error)
        self._counting.suspended(self._coroutine)
        return waits_for

    def close(self) -> None:
        self._coroutine.close()


_counting: ContextVar[_Counting | None] = ContextVar("agentrl_check_counting", default=None)


@contextmanager
def _tasks_counted() -> Iterator[None]:
    """Count in every task that an episode of this probe starts; other tasks are unchanged."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()

    async def counted(coroutine: Coroutine[object, object, T], counting: _Counting) -> T:
        return await _Counted(coroutine, counting)

    def factory(
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[object, object, T] | Generator[asyncio.Future[object] | None, None, T],
        /,
        *,
        name: str | None = None,
        context: Context | None = None,
        **_: object,  # newer Pythons may pass eager_start, which is ignored
    ) -> asyncio.Task[T]:
        counting = _counting.get()
        if counting is None or not isinstance(coroutine, Coroutine):
            return asyncio.Task(coroutine, loop=loop, name=name, context=context)
        wrapped = counted(coroutine, counting)
        return asyncio.Task(wrapped, loop=loop, name=name, context=context)

    loop.set_task_factory(factory)
    try:
        yield
    finally:
        loop.set_task_factory(before)


async def probe_cancelling(arena: Arena, policy: Policy) -> ProbeResult:
    """Cancel at the first await, the second, ...; stop at the first that leaves something open."""
    task = arena.tasks[0]

    def start() -> Coroutine[object, object, Episode | str]:
        return outcome(arena.play(policy, task, seed=arena.seed))

    with own_temporary_folder() as folder, _tasks_counted():
        # The first episode opens the resources that all episodes share: these are no leftovers.
        await start()
        before = present(folder)
        for at in range(1, MOST_CANCELS + 1):
            counting = await _cancelled(start, at)
            if not counting.cancelled:
                break
            if counting.episode is not None and not counting.episode.cancelled():
                return ProbeResult((_ignored_finding(counting.where),), {"cancels": float(at)})
            if leaks := await leftovers(before, folder):
                return ProbeResult((_leak_finding(leaks, counting.where),), {"cancels": float(at)})
    return ProbeResult((), {"cancels": float(at - 1)})


async def _cancelled(start: Callable[[], Coroutine[object, object, Episode | str]], at: int) -> _Counting:
    counting = _Counting(at)
    token = _counting.set(counting)
    try:
        counting.episode = asyncio.get_running_loop().create_task(start())
    finally:
        _counting.reset(token)
    await asyncio.wait([counting.episode])
    return counting


def _ignored_finding(where: str) -> Finding:
    text = f"an episode cancelled at `{where}` goes on; let asyncio.CancelledError pass."
    return error("ignores-cancelling", text)


def _leak_finding(leaks: list[Trace], where: str) -> Finding:
    kind, name = leaks[0]
    text = (
        f"an episode cancelled at `{where}` leaves a {kind} behind ({name}, {len(leaks)} in all); let go of "
        "it in `close`, or in a `finally` around the await."
    )
    return error(LEAVES[kind], text)


def _innermost(coroutine: object) -> str:
    """`qualified_name, line N` of the code in which a coroutine is suspended."""
    inner, name = coroutine, ""
    while isinstance(inner, Coroutine) and (frame := getattr(inner, "cr_frame", None)) is not None:
        name = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
        inner = getattr(inner, "cr_await", None)
    return name
