"""Objects in child processes of this one: the driver's side. See `processes/hosted.py` for the other.

consumes: the answers of each child, which a thread of its own reads. waits for: the next one. unblocked by:
that, or the end of the child, which fails all of its pending calls. on shutdown: `close` kills the child; one
whose driver is killed ends by itself.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from types import MappingProxyType
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

from agentrl.errors import AgentRLError, RemoteError
from agentrl.processes.child import Child
from agentrl.processes.gpus import variables_of
from agentrl.processes.hosted import PICKLE_PROTOCOL, AnswerHeader, CallKind, Header
from agentrl.processes.remote import LOOPBACK, PendingCall, SharedArguments, last_lines_of, path_of

_MODULE = "agentrl.processes.hosted"
UNREADABLE = (pickle.UnpicklingError, AttributeError, ImportError, IndexError, TypeError, ValueError)
"""What pickle raises where an object is of a class that this process does not have."""

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class ChildObject(Generic[T]):
    """An object in a child; see `Remote`. name: of the process. on_message: gets what it tells, in a thread.

    variables: of the process's environment, over those of this one.
    """

    is_here = True

    def __init__(
        self,
        name: str,
        log: Path,
        variables: Mapping[str, str] = MappingProxyType({}),
        on_message: Callable[[object], None] = lambda _: None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self._on_message = log, on_message
        self._child = Child(_MODULE, (name,), log, variables)
        self._outbox = SimpleQueue[tuple[Header, bytes] | None]()
        self._calls: dict[int, Future[object]] = {}
        self._number, self._ended, self._lock = 0, "", Lock()
        # A child that stands still takes no messages: whoever calls it does not wait for that.
        self._threads = [Thread(target=run, daemon=True) for run in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._child.pid

    @property
    def process(self) -> str:
        """Its process, among those of this machine."""
        return f"process {self.pid}"

    @property
    def where(self) -> str:
        """Its process, for a sentence."""
        return f"process {self.pid}"

    def create(self, kind: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> PendingCall[None]:
        """Begin to make the object; see `Remotes.start`."""
        return self._posted("create", path_of(kind), _pickled(*args, **kwargs), Future[None]())

    def call(
        self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[R]:
        """Begin a call of a method, after all earlier ones."""
        return self._begin("call", method, _pickled(*args, **kwargs))

    def shared(self, *args: object, **kwargs: object) -> SharedArguments:
        """Arguments as bytes."""
        return SharedArguments(_pickled(*args, **kwargs))

    def call_shared(
        self, method: Callable[Concatenate[T, P], R], arguments: SharedArguments
    ) -> PendingCall[R]:
        """Begin a call of a method, after all earlier ones."""
        assert isinstance(arguments.held, bytes), "they are of a child"
        return self._begin("call", method, arguments.held)

    def call_beside(
        self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[R]:
        """Begin a call of a method now, in another thread of the child."""
        return self._begin("beside", method, _pickled(*args, **kwargs))

    def print_stacks(self) -> None:
        """Have the process print the stacks of its threads into its log now."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kill the process without waiting."""
        self._child.end()

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self._child.end()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join()
        self._child.kill()

    def last_lines(self) -> list[str]:
        """The last lines of its log that are not empty."""
        return last_lines_of(self.log)

    def _begin(
        self, kind: CallKind, method: Callable[Concatenate[T, P], R], arguments: bytes
    ) -> PendingCall[R]:
        return self._posted(kind, method.__name__, arguments, Future[R]())

    def _posted(self, kind: CallKind, name: str, arguments: bytes, future: Future[R]) -> PendingCall[R]:
        # Whoever waits for it does not cancel it.
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._ended:
                future.set_exception(RemoteError(self._ended, is_gone=True))
                return PendingCall(future)
            self._number += 1
            self._calls[self._number] = cast(Future[object], future)
            self._outbox.put((Header(self._number, kind, name), arguments))
        return PendingCall(future)

    def _write(self) -> None:
        # The end of the child shows where its answers are read.
        with suppress(OSError):
            while (message := self._outbox.get()) is not None:
                header, arguments = message
                self._child.pipe.send(header)
                self._child.pipe.send_bytes(arguments)
                del message, arguments

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                header: AnswerHeader = self._child.pipe.recv()
                self._settle(header, self._child.pipe.recv_bytes())
        ended = self._child.exit_description() or "has closed its pipe"
        with self._lock:
            self._ended, calls = ended, list(self._calls.values())
            self._calls.clear()
        for call in calls:
            call.set_exception(RemoteError(ended, is_gone=True))

    def _settle(self, header: AnswerHeader, data: bytes) -> None:
        error: Exception | None = None
        try:
            value: object = pickle.loads(data)
        except UNREADABLE as unreadable:
            value, error = None, unreadable
        if header.is_error and isinstance(value, AgentRLError):
            error = value
        if header.number is None:
            self._on_message(value)
            return
        with self._lock:
            call = self._calls.pop(header.number)
        if error is not None:
            call.set_exception(error)
        else:
            call.set_result(value)


class Children:
    """Objects in child processes; see `Remotes`.

    gpus: of each, as in CUDA_VISIBLE_DEVICES; left out, they see those of this process.
    """

    host = LOOPBACK

    def __init__(self, gpus: Sequence[Sequence[str]] = ()) -> None:
        self._gpus = gpus

    def is_here(self, number: int) -> bool:
        """All are."""
        del number
        return True

    def number_here(self, number: int) -> int:
        """All are on one machine; one with GPUs of its own sees no others."""
        return 0 if self._gpus else number

    def start(
        self,
        number: int,
        log: Path,
        on_message: Callable[[object], None],
        kind: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[ChildObject[T], PendingCall[None]]:
        """Start a process, and begin to make an object in it."""
        variables = variables_of(self._gpus[number] if self._gpus else ())
        remote = ChildObject[T](log.stem, log, variables, on_message)
        return remote, remote.create(kind, *args, **kwargs)


def _pickled(*args: object, **kwargs: object) -> bytes:
    """Arguments of a call."""
    return pickle.dumps((args, kwargs), PICKLE_PROTOCOL)
