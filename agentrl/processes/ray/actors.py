"""Objects in processes that Ray starts in the bundles of a placement: the driver's side.

Calls of one object run in the order in which they are made. What `put` returns is in the object store once,
and reaches any number of objects by reference; arrays in it are read in place, and cannot be written to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar, cast

from agentrl.errors import AgentRLError, DiskError, RemoteError
from agentrl.processes.hosted import Arguments
from agentrl.processes.placement import Allocation
from agentrl.processes.ray.actor import Actor, in_bundle
from agentrl.processes.ray.host import HostSettings, Identity, ObjectHost
from agentrl.processes.ray.session import RaySession
from agentrl.processes.remote import LOOPBACK, PendingCall, SharedArguments, last_lines_of, path_of

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup
import threading

from agentrl.processes.ray.actor import on_node
from agentrl.processes.ray.host import LogReader

_INTERVAL_S = 0.5
_TIMEOUT_S = 5.0
_PIECE_BYTES = 1 << 20


class LogMirror:
    """Copies the log of a process to `here`, from now on. name: of the actor that does, in Ray's lists."""

    def __init__(self, session: RaySession, name: str, of: Identity, here: Path) -> None:
        self._reader = Actor(LogReader, name=name, namespace=session.namespace, strategy=on_node(of.node))
        self._there, self._here, self._offset = of.log, here, 0
        self.is_lost = False
        self._copying = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="agentrl-log", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Copy all that the file has now; nothing where the machine does not answer, or the disk is full."""
        with suppress(OSError), self._copying, self._here.open("ab") as file:
            while piece := self._read():
                file.write(piece)
                self._offset += len(piece)

    def is_reachable(self) -> bool:
        """Whether the machine answers; nothing is read any more from one that does not."""
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            ray.get(self._reader.control("read", self._there, 0, 0), timeout=_TIMEOUT_S)
            return True
        self.is_lost = True
        return False

    def close(self) -> None:
        """Copy the rest, and remove the file there."""
        import ray
        from ray.exceptions import RayError

        self._closed.set()
        self._thread.join()
        # Each of its calls would wait for a machine that does not answer.
        if not self.is_lost and self.is_reachable():
            self.catch_up()
            with suppress(RayError):
                ray.get(self._reader.call("remove", self._there), timeout=_TIMEOUT_S)
        self._reader.kill()

    def _read(self) -> bytes:
        import ray
        from ray.exceptions import RayError

        if self.is_lost:
            return b""
        with suppress(RayError):
            piece = ray.get(
                self._reader.call("read", self._there, self._offset, _PIECE_BYTES), timeout=_TIMEOUT_S
            )
            assert isinstance(piece, bytes), piece
            return piece
        return b""

    def _follow(self) -> None:
        while not self._closed.wait(_INTERVAL_S):
            self.catch_up()


P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

_FULL = (
    "is full, and so is the disk that it spills to; make room in Ray's --temp-dir, or start Ray with more "
    "--object-store-memory"
)


def emptied(log: Path) -> Path:
    """The log, without what an earlier process has written."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    return log


class ActorProcess:
    """The process of an actor in an allocation, with its log, until `close` or the end of this process.

    log: gets its output, here on this machine; that of another machine is copied every moment. environment:
    variables of the process, over those that the run passes on. name: in Ray's lists; left out, that of the
    log. The constructor does not wait: start all first.
    """

    def __init__(
        self,
        session: RaySession,
        group: PlacementGroup,
        allocation: Allocation,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        name: str = "",
    ) -> None:
        self.allocation, self.log, self._session = allocation, log, session
        self.is_here = allocation.node == session.node
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        # Of a bundle that has moved, only Ray knows the devices.
        num_gpus = len(allocation.devices) if allocation.has_bundle else 0
        given = () if num_gpus else allocation.devices
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(given)} if given else {}
        settings = HostSettings(
            f"{session.namespace}-{log.stem}",
            log.resolve() if self.is_here else None,
            {**session.environment, **devices, **(environment or {})},
        )
        strategy = in_bundle(group, allocation.bundle)
        self._name = session.new_name(name or log.stem.replace("-", " "))
        named = {"name": self._name, "namespace": session.namespace}
        self._actor = Actor(ObjectHost, settings, strategy=strategy, num_gpus=num_gpus, **named)
        self._identity: Identity | None = None
        self._mirror: LogMirror | None = None

    def identify(self) -> Identity:
        """Its process; waits until it is up, and has its log copied from then on.

        Raises:
            RemoteError: it did not start.
        """
        return self._identity or self._identified(self._identity_call().result())

    async def identified(self) -> Identity:
        """As `identify`, in an event loop, and without a thread that waits.

        Raises:
            RemoteError: it did not start.
        """
        return self._identity or self._identified(await self._identity_call().reply())

    def _identity_call(self) -> PendingCall[Identity]:
        return self._pending(self._actor.control("identity"))

    def _identified(self, identity: Identity) -> Identity:
        self._identity = identity
        if not self.is_here:
            name = self._session.new_name(f"log of {self._name.removeprefix(f'{self._session.title} ')}")
            self._mirror = LogMirror(self._session, name, identity, self.log)
        return identity

    @property
    def pid(self) -> int:
        """Its process on its machine; waits until it is up; see `Remote`."""
        return self.identify().pid

    @property
    def process(self) -> str:
        """Its process, among those of the cluster; waits until it is up; see `Remote`."""
        identity = self.identify()
        return f"process {identity.pid} on {identity.node}"

    @property
    def where(self) -> str:
        """Its process and its machine, for a sentence."""
        if self._identity is None:
            return f"process ? on {self.allocation.host}"
        return f"process {self._identity.pid} on {self._identity.host}"

    @property
    def machine_is_gone(self) -> bool:
        """Whether its machine did not answer when the process had gone."""
        return self._mirror is not None and self._mirror.is_lost

    def _pending(self, ref: ObjectRef[object]) -> PendingCall[R]:
        # Ray knows methods by their names alone.
        return PendingCall(cast(Future[R], ref.future()), self._described)

    def _described(self, error: BaseException) -> BaseException:
        """An error of Ray in a sentence."""
        from ray.exceptions import (
            ObjectStoreFullError,
            OutOfDiskError,
            RayError,
            RaySystemError,
            RayTaskError,
        )

        # That of a reply which this process cannot read.
        if not isinstance(error, RayError) or isinstance(error, RaySystemError):
            return error
        if not isinstance(error, RayTaskError):
            return RemoteError(self.end_reason(error), is_gone=True)
        if isinstance(error.cause, ObjectStoreFullError | OutOfDiskError):
            return RemoteError(f"Ray's object store on its machine {_FULL}", at_s=time.time())
        if isinstance(error.cause, AgentRLError):
            return error.cause
        return RemoteError(_first_line(error.cause or error), at_s=time.time())

    def print_stacks(self) -> None:
        """Have the process print the stacks of its threads into its log now."""
        self._actor.control("print_stacks")

    def end(self) -> None:
        """Kill the process without waiting; any thread may do that. Pending calls then raise RemoteError."""
        self._actor.kill()

    def close(self) -> None:
        """Kill the process, and copy the rest of its log."""
        self.end()
        if self._mirror is not None:
            self._mirror.close()

    def last_lines(self) -> list[str]:
        """The last lines of its log, as far as its machine can still be reached."""
        if self._mirror is not None:
            self._mirror.catch_up()
        return last_lines_of(self.log)

    def end_reason(self, error: Exception) -> str:
        """How it ended, after an error of Ray that says that it has."""
        # Ray counts a machine as alive for some seconds more.
        if self._mirror is not None and not self._mirror.is_reachable():
            return "has gone with its machine"
        text = str(error)
        if "ray.kill" in text:
            return "was ended by the run"
        if "low on memory" in text or "OutOfMemory" in type(error).__name__:
            return "was ended by Ray, since its machine ran out of memory"
        if "creation task" in text:
            lines = [line for line in text.splitlines() if line.strip()]
            return f"did not start: {lines[-1].strip()}"
        return "was killed, or crashed"


class ActorObject(ActorProcess, Generic[T]):
    """An object in the process of an actor; see `Remote`."""

    def create(self, kind: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> PendingCall[None]:
        """Begin to make the object. kind: its class, or a function of a module that makes it."""
        return self._pending(self._actor.call("create", path_of(kind), (args, kwargs)))

    def call(
        self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[R]:
        """Begin a call of a method, after all earlier ones."""
        return self._pending(self._actor.call("call", method.__name__, (args, kwargs)))

    def shared(self, *args: object, **kwargs: object) -> SharedArguments:
        """Arguments in the object store, once.

        Raises:
            DiskError: that is full, and so is its disk.
        """
        return SharedArguments(_stored((args, kwargs)))

    def call_shared(
        self, method: Callable[Concatenate[T, P], R], arguments: SharedArguments
    ) -> PendingCall[R]:
        """Begin a call of a method, after all earlier ones."""
        return self._pending(self._actor.call("call", method.__name__, arguments.held))

    def call_beside(
        self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> PendingCall[R]:
        """Begin a call of a method now, in another thread of the process."""
        return self._pending(self._actor.concurrent("call_beside", method.__name__, (args, kwargs)))

    def listen(self, on_message: Callable[[object], None]) -> None:
        """Pass on what the object tells, in a thread, until the process ends."""
        Thread(target=self._listen, args=(on_message,), daemon=True).start()

    def _listen(self, on_message: Callable[[object], None]) -> None:
        with suppress(RemoteError):
            while True:
                messages: PendingCall[list[object]] = self._pending(self._actor.told("told"))
                for message in messages.result():
                    on_message(message)


class Actors:
    """Objects in the bundles of a placement; see `Remotes`. Their number is that of their allocation."""

    def __init__(self, session: RaySession, group: PlacementGroup, allocations: Sequence[Allocation]) -> None:
        self._session, self._group, self._allocations = session, group, allocations
        is_near = all(allocation.node == session.node for allocation in allocations)
        self.host = LOOPBACK if is_near else session.host

    def is_here(self, number: int) -> bool:
        """Whether its allocation is on this machine."""
        return self._allocations[number].node == self._session.node

    def number_here(self, number: int) -> int:
        """Its number among those of its machine; 0 for one that has GPUs, since it sees no others."""
        own = self._allocations[number]
        return 0 if own.devices else sum(other.node == own.node for other in self._allocations[:number])

    def start(
        self,
        number: int,
        log: Path,
        on_message: Callable[[object], None],
        kind: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[ActorObject[T], PendingCall[None]]:
        """Start a process, and begin to make an object in it."""
        actor = ActorObject[T](self._session, self._group, self._allocations[number], emptied(log))
        actor.listen(on_message)
        return actor, actor.create(kind, *args, **kwargs)


def _stored(arguments: Arguments) -> ObjectRef[Arguments]:
    """Where the object store is full, Ray writes others of it to its disk."""
    import ray
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    try:
        return ray.put(arguments)
    except (ObjectStoreFullError, OutOfDiskError):
        raise DiskError(
            f"Ray's object store on the run's machine {_FULL}, then resume with --resume."
        ) from None


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
