"""The process of a `Remote`: it holds one object, whose methods the driver calls.

    python -m agentrl.processes.hosted FD NAME

FD: its end of a pipe to the driver. NAME: for whoever looks at a list of processes. A message of the driver
is a header and the pickled arguments; one to the driver is a header and a pickled value.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Final, Literal, NamedTuple, TypeAlias

from agentrl.errors import AgentRLError, RemoteError
from agentrl.processes.child import follow_driver
from agentrl.processes.remote import MAX_ERROR_CHARS

_PACKAGE: Final = "agentrl."
PICKLE_PROTOCOL: Final = 5
"""It copies the bytes of an array once."""
BESIDE_THREADS: Final = 2
"""Calls that run beside those in order (count)."""

CallKind: TypeAlias = Literal["create", "call", "beside"]
Arguments: TypeAlias = tuple[tuple[object, ...], Mapping[str, object]]


class Header(NamedTuple):
    """Of a call. number: of its answer. method: to call; to create the object, the path of its class."""

    number: int
    kind: CallKind
    method: str


class AnswerHeader(NamedTuple):
    """Of an answer. number: of the call; None = a message of the object. is_error: an exception."""

    number: int | None
    is_error: bool = False


class ObjectHolder:
    """Makes an object and calls its methods.

    An exception of the object is printed into the log, and raised as one that any process can read.
    """

    def __init__(self) -> None:
        self._object: object = None

    def create(self, target: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Make the object. target: its class, or a function that makes it, as `package.module:name`."""
        with Reported():
            module, _, name = target.partition(":")
            self._object = getattr(importlib.import_module(module), name)(*args, **kwargs)

    def call(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """Call a method of the object."""
        with Reported():
            return getattr(self._object, method)(*args, **kwargs)


class Reported:
    """Prints an exception of its block, and raises it as one that any process can read.

    An `AgentRLError` stays what it is, where it can be sent. Any other is a RemoteError: its class may be one
    that the driver cannot import.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        traceback.print_exception(error, file=sys.stderr)
        sys.stderr.flush()
        if isinstance(error, AgentRLError) and _can_be_sent(error):
            return
        first_line = next(iter(str(error).splitlines()), "")
        described = f"{type(error).__name__}: {first_line}"[:MAX_ERROR_CHARS]
        raise RemoteError(described, at_s=time.time()) from None


def _can_be_sent(error: AgentRLError) -> bool:
    if not type(error).__module__.startswith(_PACKAGE):
        return False
    try:
        return isinstance(pickle.loads(pickle.dumps(error)), type(error))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError):
        return False


def tell(message: object) -> None:
    """Send the driver a message, which whoever started this process reads; elsewhere this does nothing."""
    _listener[0](message)


def listen(listener: Callable[[object], None]) -> None:
    """Have what this process tells go to `listener`, from any thread."""
    _listener[0] = listener


def _ignore(message: object) -> None:
    del message


_listener: Final[list[Callable[[object], None]]] = [_ignore]


class PipeHost:
    """Answers the calls that arrive on a pipe, until the driver closes it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._holder = pipe, ObjectHolder()
        self._calls = SimpleQueue[tuple[Header, bytes] | None]()
        self._beside = ThreadPoolExecutor(BESIDE_THREADS, "agentrl-beside")
        self._sending = Lock()

    def serve(self) -> None:
        """Run the calls in this thread, in their order; those beside them in others."""
        listen(lambda message: self._send(AnswerHeader(None), message))
        Thread(target=self._read, daemon=True).start()
        while (call := self._calls.get()) is not None:
            self._answer(*call)
            del call

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                header: Header = self._pipe.recv()
                arguments = self._pipe.recv_bytes()
                if header.kind == "beside":
                    self._beside.submit(self._answer, header, arguments)
                else:
                    self._calls.put((header, arguments))
        self._calls.put(None)

    def _answer(self, header: Header, arguments: bytes) -> None:
        try:
            with Reported():
                read: Arguments = pickle.loads(arguments)
            args, kwargs = read
            value: object = None
            if header.kind == "create":
                self._holder.create(header.method, args, kwargs)
            else:
                value = self._holder.call(header.method, args, kwargs)
            self._send(AnswerHeader(header.number), value)
        except AgentRLError as error:
            self._send(AnswerHeader(header.number, is_error=True), error)

    def _send(self, header: AnswerHeader, value: object) -> None:
        with Reported():
            data = pickle.dumps(value, PICKLE_PROTOCOL)
        # Where the driver has gone, this process ends.
        with self._sending, suppress(OSError):
            self._pipe.send(header)
            self._pipe.send_bytes(data)


if __name__ == "__main__":
    _pipe = Connection(int(sys.argv[1]))
    follow_driver(_pipe)
    # Not this module's, which would be a second one of its name.
    importlib.import_module("agentrl.processes.hosted").PipeHost(_pipe).serve()
