"""Cancelling at any await leaves nothing behind.

The expert (or random play, where there is none) is played and cancelled at its first await, its second,
and so on, until an episode comes to its end. An await is a suspension of the episode's own task or of any
task it has started: they are counted by wrapping every coroutine that becomes a task meanwhile.
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
from agentrl.envs.check.report import Finding, Probed, error
from agentrl.envs.check.traces import Trace, left_behind, own_temporary_folder, present
from agentrl.types import Episode

MOST_CANCELS = 400

T = TypeVar("T")


@dataclass(slots=True)
class _Counting:
    """Counts suspensions and cancels the episode at the `at`-th of them. where: the code that waited then."""

    at: int
    seen: int = 0
    where: str = ""
    cancelled: bool = False
    episode: asyncio.Task[Episode | str] | None = None

    def suspended(self, coroutine: object) -> None:
        """Something of this episode waits now."""
        self.seen += 1
        if self.seen == self.at and self.episode is not None:
            self.where = _innermost(coroutine)
            # Not here: the task that suspends has not yet said what it waits for.
            asyncio.get_running_loop().call_soon(self._cancel, self.episode)

    def _cancel(self, episode: asyncio.Task[Episode | str]) -> None:
        self.cancelled = episode.cancel()


class _Counted(Generator[object, object, T]):
    """A coroutine, each suspension of which is reported; await it in the coroutine's place."""

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
    """Count in every task that an episode of ours starts; other people's tasks are left as they are."""
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
        **_: object,  # newer Pythons offer to start a task at once: it may as well start in its turn
    ) -> asyncio.Task[T]:
        counting = _counting.get()
        if counting is None or not isinstance(coroutine, Coroutine):
            return asyncio.Task(coroutine, loop=loop, name=name, context=context)
        chosen = counted(coroutine, counting)
        return asyncio.Task(chosen, loop=loop, name=name, context=context)

    loop.set_task_factory(factory)
    try:
        yield
    finally:
        loop.set_task_factory(before)


async def probe_cancelling(arena: Arena, policy: Policy) -> Probed:
    """Cancel at the first await, the second, ...; stop at the first that leaves something."""
    task = arena.tasks[0]

    def start() -> Coroutine[object, object, Episode | str]:
        return outcome(arena.play(policy, task, seed=arena.seed))

    with own_temporary_folder() as folder, _tasks_counted():
        # What the tools of all episodes share is opened by the first, and is no leftover of the others.
        await start()
        before = present(folder)
        for at in range(1, MOST_CANCELS + 1):
            counting = await _cancelled(start, at)
            if not counting.cancelled:
                break
            if counting.episode is not None and not counting.episode.cancelled():
                return Probed((_ignored(counting.where),), {"cancels": float(at)})
            if left := await left_behind(before, folder):
                return Probed((_leftover(left, counting.where),), {"cancels": float(at)})
    return Probed((), {"cancels": float(at - 1)})


async def _cancelled(start: Callable[[], Coroutine[object, object, Episode | str]], at: int) -> _Counting:
    counting = _Counting(at)
    token = _counting.set(counting)
    try:
        counting.episode = asyncio.get_running_loop().create_task(start())
    finally:
        _counting.reset(token)
    await asyncio.wait([counting.episode])
    return counting


def _ignored(where: str) -> Finding:
    text = f"an episode cancelled at `{where}` goes on; let asyncio.CancelledError pass."
    return error("ignores-cancelling", text)


def _leftover(left: list[Trace], where: str) -> Finding:
    kind, name = left[0]
    text = (
        f"an episode cancelled at `{where}` leaves a {kind} behind ({name}, {len(left)} in all); let go of "
        "it in `close`, or in a `finally` around the await."
    )
    return error(f"leaves-{kind}", text)


def _innermost(coroutine: object) -> str:
    """`qualified_name, line N` of the code that a coroutine waits in."""
    inner, name = coroutine, ""
    while isinstance(inner, Coroutine) and (frame := getattr(inner, "cr_frame", None)) is not None:
        name = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
        inner = getattr(inner, "cr_await", None)
    return name
