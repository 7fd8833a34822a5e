"""The boundary to code of users: a deadline, and errors that name the stage and the place."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import TypeVar

from agentrl.errors import AgentRLError, EnvCodeError, StageError, UserError
from agentrl.runtime.activity import Activity, current_activity
from agentrl.runtime.authorship import place_of
from agentrl.runtime.clocks import Clock
from agentrl.runtime.interrupts import SignalExit

T = TypeVar("T")


def stage(name: str, timeout_s: float | None, what: str = "") -> Stage:
    """Run code of users under a deadline and convert its exceptions to StageErrors of stage `name`.

    what: more of the stage, such as a tool's name, for the status of a run and its timeline. The deadline
    counts the time of the body itself (`agentrl.runtime.clocks`), without waits for a slot and pauses of the
    process. A StageError of an inner stage passes through outer ones unchanged. Cancellation from outside and
    UserErrors pass through unchanged, too. A call of exit() is an exception of the body.

    Raises:
        StageError: the body overran `timeout_s` seconds, or raised.
    """
    return Stage(name, timeout_s, what)


class Stage:
    """The block of `async with stage(...)`; the current activity is in that stage."""

    __slots__ = ("_activity", "_clock", "_timeout_s", "name", "since_s", "what")

    def __init__(self, name: str, timeout_s: float | None, what: str = "") -> None:
        self.name, self.what, self._timeout_s = name, what, timeout_s
        self._clock: Clock | None = None
        self.since_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that its clock has counted; 0.0 without a deadline."""
        return 0.0 if self._clock is None else self._clock.seconds

    async def __aenter__(self) -> None:
        activity: Activity | None = current_activity()
        self._activity = activity
        if activity is not None:
            activity.begin(self)
        if self._timeout_s is None:
            return
        self._clock = Clock(self._timeout_s)
        await self._clock.deadline.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        activity = self._activity
        if activity is not None:
            activity.end(self)
        is_late = await self._ended(kind, error, trace)
        if isinstance(error, StageError | UserError | SignalExit):
            return
        if is_late:
            raise StageError(self.name, "timeout", f"took longer than {self._timeout_s:g} s") from error
        if isinstance(error, Exception | SystemExit):
            place = place_of(error, installed=False)
            where = f" ({place})" if place else ""
            raise StageError(self.name, "error", f"{summary_of(error)}{where}") from error

    async def _ended(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Whether the deadline ended the body; a TimeoutError of the body's own is none of ours."""
        if self._clock is None:
            return False
        self._clock.end()
        deadline = self._clock.deadline
        try:
            await deadline.__aexit__(kind, error, trace)
        except TimeoutError:
            return True
        return isinstance(error, Exception) and deadline.expired()


class EnvCode:
    """The block of `with EnvCode("Maze-v0", "tasks")`: code of an environment outside of its episodes.

    Its exceptions, exit() included, become an EnvCodeError with their place in the author's file. Errors of
    this package pass through, and so does a missing module, which may belong to an extra.

    stage: of the error; left out, the name of the method.
    """

    __slots__ = ("_method", "_owner", "_stage")

    def __init__(self, owner: str, method: str, *, stage: str = "") -> None:
        self._owner, self._method, self._stage = owner, method, stage or method

    def __enter__(self) -> EnvCode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, _PASSING):
            place = place_of(error)
            where = f" in {place}" if place else ""
            raise self.error("error", f"failed{where} ({summary_of(error)}); mend it") from error

    def error(self, kind: str, problem: str) -> EnvCodeError:
        """The error for a problem of this code."""
        return EnvCodeError(self._stage, kind, f"{self._owner}: `{self._method}` {problem}.")


_PASSING = (AgentRLError, ModuleNotFoundError, SignalExit)


def summary_of(error: BaseException) -> str:
    """The type and the message of an exception, in one line; of SystemExit also what to do."""
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    return f"exit() was called, {summary}; raise an exception" if isinstance(error, SystemExit) else summary


async def all_of(coroutines: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Run all at once and return their results in order.

    The first exception cancels the others, waits until they have cleaned up, and is raised without a group.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return [task.result() for task in tasks]
