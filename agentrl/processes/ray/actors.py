"""Objects in processes that Ray starts in the bundles of a placement: the driver's side.

Calls of one object run in the order in which they are made. What `put` returns is in the object store once,
and reaches any number of objects by reference; arrays in it are read in place, and cannot be written to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import ClusterError, DiskError
from agentrl.processes.placement import Allocation
from agentrl.processes.ray.actor import Actor, in_bundle
from agentrl.processes.ray.host import HostSettings, Identity, ObjectHost
from agentrl.processes.ray.logs import LogMirror
from agentrl.processes.ray.session import RaySession

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

_LAST_LINES = 8
_FULL = (
    "is full, and so is the disk that it spills to; make room in Ray's --temp-dir, or start Ray with more "
    "--object-store-memory"
)


class SharedActor:
    """Arguments in the object store."""

    def __init__(self, ref: ObjectRef[tuple[object, ...]]) -> None:
        self.ref = ref


def put(*args: object) -> SharedActor:
    """Arguments of a call of several objects, copied once; where the object store is full, Ray writes others
    of it to its disk.

    Raises:
        DiskError: that is full, too.
    """
    import ray
    from ray.exceptions import ObjectStoreFullError, OutOfDiskError

    try:
        return SharedActor(ray.put(args))
    except (ObjectStoreFullError, OutOfDiskError):
        raise DiskError(
            f"Ray's object store on the run's machine {_FULL}, then resume with --resume."
        ) from None


class PendingCall:
    """A call that has begun, of an object."""

    def __init__(self, of: RemoteObject, ref: ObjectRef[object]) -> None:
        self.of = of
        self.ref = ref

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(completed([self], 0))

    def result(self) -> object:
        """What the method returned; waits for it.

        Raises:
            ClusterError: the method raised an exception, or the process or its machine has gone.
        """
        import ray
        from ray.exceptions import RayError

        try:
            return ray.get(self.ref)
        except RayError as error:
            raise self._described(error) from None

    async def reply(self) -> object:
        """As `result`, in an event loop, and without a thread that waits.

        Raises:
            ClusterError: as for `result`.
        """
        from ray.exceptions import RayError

        try:
            return await asyncio.wrap_future(self.ref.future())
        except RayError as error:
            # It asks the machine whether it is there.
            raise await asyncio.to_thread(self._described, error) from None

    def _described(self, error: Exception) -> ClusterError:
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError

        if not isinstance(error, RayTaskError):
            return ClusterError(self.of.end_reason(error), is_gone=True)
        if isinstance(error.cause, ObjectStoreFullError | OutOfDiskError):
            return ClusterError(f"Ray's object store on its machine {_FULL}", at_s=time.time())
        if isinstance(error.cause, ClusterError):
            return ClusterError(str(error.cause), at_s=error.cause.at_s)
        return ClusterError(_first_line(error.cause or error), at_s=time.time())


def completed(calls: Sequence[PendingCall], timeout_s: float | None = None) -> list[PendingCall]:
    """Those of the calls that have ended, well or not; waits for the first. [] = none in time."""
    import ray

    done, _ = ray.wait([call.ref for call in calls], num_returns=1, timeout=timeout_s, fetch_local=False)
    return [call for call in calls if call.ref in done]


def emptied(log: Path) -> Path:
    """The log, without what an earlier process has written."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    return log


class RemoteObject:
    """An object in a process of its own, in an allocation, until `close` or the end of this process.

    log: gets its output, here on this machine; that of another machine is copied every moment. environment:
    variables of the process, over those that the run passes on. name: in Ray's lists; left out, that of the
    log. The constructor does not wait, and `create`
    does not either: start all objects first.
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
        is_here = allocation.node == session.node
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        # Of a bundle that has moved, only Ray knows the devices.
        num_gpus = len(allocation.devices) if allocation.has_bundle else 0
        given = () if num_gpus else allocation.devices
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(given)} if given else {}
        settings = HostSettings(
            f"{session.namespace}-{log.stem}",
            log.resolve() if is_here else None,
            {**session.environment, **devices, **(environment or {})},
        )
        strategy = in_bundle(group, allocation.bundle)
        self._name = session.new_name(name or log.stem.replace("-", " "))
        named = {"name": self._name, "namespace": session.namespace}
        self._actor = Actor(ObjectHost, settings, strategy=strategy, num_gpus=num_gpus, **named)
        self._is_here = is_here
        self._identity: Identity | None = None
        self._mirror: LogMirror | None = None

    def identify(self) -> Identity:
        """Its process; waits until it is up, and has its log copied from then on.

        Raises:
            ClusterError: it did not start.
        """
        return self._identity or self._identified(self._identity_call().result())

    async def identified(self) -> Identity:
        """As `identify`, in an event loop, and without a thread that waits.

        Raises:
            ClusterError: it did not start.
        """
        return self._identity or self._identified(await self._identity_call().reply())

    def _identity_call(self) -> PendingCall:
        return PendingCall(self, self._actor.control("identity"))

    def _identified(self, identity: object) -> Identity:
        assert isinstance(identity, Identity), identity
        self._identity = identity
        if not self._is_here:
            name = self._session.new_name(f"log of {self._name.removeprefix(f'{self._session.title} ')}")
            self._mirror = LogMirror(self._session, name, identity, self.log)
        return identity

    @property
    def where(self) -> str:
        """Its process and its machine, for an error message."""
        if self._identity is None:
            return f"process ? on {self.allocation.host}"
        return f"process {self._identity.pid} on {self._identity.host}"

    @property
    def machine_is_gone(self) -> bool:
        """Whether its machine did not answer when the process had gone."""
        return self._mirror is not None and self._mirror.is_lost

    def create(self, target: str, *args: object) -> PendingCall:
        """Begin to make the object. target: its class or a function, as `package.module:name`."""
        return PendingCall(self, self._actor.call("create", target, *args))

    def call(self, method: str, *args: object) -> PendingCall:
        """Begin a call of a method, after all earlier ones."""
        return PendingCall(self, self._actor.call("call", method, args))

    def call_shared(self, method: str, args: SharedActor) -> PendingCall:
        """Begin a call with arguments that are in the object store."""
        return PendingCall(self, self._actor.call("call", method, args.ref))

    def call_concurrently(self, method: str, *args: object) -> PendingCall:
        """Begin a call of a method now, whatever else the object does; it must be safe in another thread."""
        return PendingCall(self, self._actor.concurrent("call_concurrently", method, *args))

    def print_stacks(self) -> None:
        """Have the process print the stacks of its threads into its log now."""
        self._actor.control("print_stacks")

    def end(self) -> None:
        """Kill the process without waiting; any thread may do that. Pending calls then raise ClusterError."""
        self._actor.kill()

    def close(self) -> None:
        """Kill the process, and copy the rest of its log."""
        self.end()
        if self._mirror is not None:
            self._mirror.close()

    def last_lines(self, count: int = _LAST_LINES) -> list[str]:
        """The last lines of its log, as far as its machine can still be reached."""
        if self._mirror is not None:
            self._mirror.catch_up()
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line for line in lines if line.strip()][-count:]

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


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
