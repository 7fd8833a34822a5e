"""`Remote`: an object of ours in another process, here as a child or on a machine of a Ray cluster.

    remote, created = children.start(0, log, print, Counter, 3)
    remote.call(Counter.add, 2).result()      # after all earlier calls
    remote.call_beside(Counter.total).result()  # now, in another thread of that process

Methods are named by the class's functions, so calls and replies have types. `processes/children.py` and
`processes/ray/actors.py` are the two backends; `tests/processes/test_remote.py` has what both of them do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar

from agentrl.errors import AgentRLError, RemoteError
from agentrl.runtime.stage import summary_of

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

MAX_ERROR_CHARS = 300
"""Of an exception's type and message, where it reaches another process."""
LOOPBACK = "127.0.0.1"
"""The address at which objects of this machine reach this process."""
LAST_LINES = 8
"""Of a log, in the sentence of a failure."""


class PendingCall(Generic[R_co]):
    """A call that has begun. future: of its value. described: what an exception of the future says.

    An `AgentRLError` of the object is raised as it is, and any other exception as a RemoteError.
    """

    def __init__(
        self, future: Future[R_co], described: Callable[[BaseException], BaseException] = lambda error: error
    ) -> None:
        self.future, self._described = future, described

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.future.done()

    def result(self) -> R_co:
        """What the method returned; waits for it.

        Raises:
            RemoteError: the method raised an exception, or the process or its machine has gone.
        """
        if (error := self.future.exception()) is not None:
            described = self._described(error)
            if not isinstance(described, AgentRLError):
                described = RemoteError(
                    f"its reply cannot be read ({summary_of(described)})", at_s=time.time()
                )
            raise described from None
        return self.future.result()

    async def reply(self) -> R_co:
        """As `result`, in an event loop, and without a thread that waits; cancelling it leaves the call.

        Raises:
            RemoteError: as for `result`.
        """
        ended = asyncio.wrap_future(self.future)
        # Its exception is read below; asyncio would log one that nobody reads.
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([ended])
        if self.future.exception() is None:
            return self.future.result()
        # A description may ask the machine whether it is there.
        return await asyncio.to_thread(self.result)


class SharedArguments(NamedTuple):
    """Arguments of a call of several objects, written once where all of them read them."""

    held: object


class Remote(Protocol[T_co]):
    """An object in a process of its own, which ends with this one.

    log: gets the output of its process, here on this machine.
    """

    log: Path

    @property
    def pid(self) -> int:
        """Its process on its machine; waits until it is up.

        Raises:
            RemoteError: it did not start.
        """

    @property
    def process(self) -> str:
        """Its process, by a name that no other one has on any machine; waits until it is up.

        Raises:
            RemoteError: it did not start.
        """

    @property
    def where(self) -> str:
        """Its process and its machine, for a sentence; does not wait."""

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine: both processes can map the same memory."""

    def call(
        self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[R]:
        """Begin a call of a method, after all earlier ones."""

    def call_beside(
        self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[R]:
        """Begin a call of a method now, whatever else the object does; it must be safe in another thread."""

    def shared(self, *args: object, **kwargs: object) -> SharedArguments:
        """Write arguments once, for `call_shared` of this and other objects.

        Raises:
            DiskError: they have no room.
        """

    def call_shared(
        self, method: Callable[Concatenate[T_co, P], R], arguments: SharedArguments
    ) -> PendingCall[R]:
        """Begin a call of a method, after all earlier ones."""

    def print_stacks(self) -> None:
        """Have the process print the stacks of its threads into its log now."""

    def end(self) -> None:
        """Kill the process without waiting; any thread may do that. Pending calls then raise RemoteError."""

    def close(self) -> None:
        """Kill the process and wait for its end; its log is complete."""

    def last_lines(self) -> list[str]:
        """The last lines of its log that are not empty."""


class Remotes(Protocol):
    """Where objects are started, numbered from 0."""

    @property
    def host(self) -> str:
        """The address at which they reach this process; a loopback address = all are on this machine."""

    def is_here(self, number: int) -> bool:
        """Whether an object is on this machine."""

    def number_here(self, number: int) -> int:
        """The number of an object among those of its machine that see the same GPUs."""

    def start(
        self,
        number: int,
        log: Path,
        on_message: Callable[[object], None],
        kind: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[Remote[T], PendingCall[None]]:
        """Start a process, and begin to make an object in it; waits for neither.

        on_message: called with what the object tells (`hosted.tell`), in a thread. kind: its class, or a
        function of a module that makes it.
        """


def call_all(
    remotes: Sequence[Remote[T]],
    method: Callable[Concatenate[T, P], R],
    *args: P.args,
    **kwargs: P.kwargs,
) -> list[PendingCall[R]]:
    """Begin the same call of several objects of one backend, whose arguments are written once.

    Raises:
        DiskError: they have no room where all of them read them.
    """
    if not remotes:
        return []
    arguments = remotes[0].shared(*args, **kwargs)
    return [remote.call_shared(method, arguments) for remote in remotes]


def completed(calls: Collection[PendingCall[R]], timeout_s: float | None = None) -> list[PendingCall[R]]:
    """Those of the calls that have ended, well or not; waits for the first. [] = none in time."""
    wait([call.future for call in calls], timeout_s, FIRST_COMPLETED)
    return [call for call in calls if call.is_done]


def path_of(kind: Callable[..., object]) -> str:
    """The import path of a class or of a function of a module, as `package.module:name`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def last_lines_of(log: Path) -> list[str]:
    """The last lines of a log that are not empty."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-LAST_LINES:]
