"""A version of the weights that a rank keeps in its own process, which Ray has started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

from agentrl.errors import AgentRLError, ClusterError, TrainerError
from agentrl.processes.ray.actors import RemoteObject
from agentrl.trainer.launch.course import RankCourse
from agentrl.trainer.launch.messages import pickled
from agentrl.trainer.launch.shared_buffers import Bytes
from agentrl.types.seams import Bucket, TensorSpec, Work

R = TypeVar("R")


class SnapshotFacts(NamedTuple):
    """A snapshot in a rank. number: by which the rank knows it. The others: see `Snapshot`."""

    number: int
    parts: tuple[tuple[TensorSpec, ...], ...]
    checksum: int
    not_finite: str | None


class Refused(NamedTuple):
    """Work on a snapshot raised this error."""

    error: AgentRLError


class RankSnapshot:
    """A snapshot in a rank; see `Snapshot`. Its calls run beside those of the rank's worker, so that a server
    that is restarted in the middle of a training step gets its weights at once.

    is_here: whether the rank, which is rank 0, is on this machine. course: of all ranks. failure: the error
    of the rank, from one of Ray.
    """

    device = None

    def __init__(
        self,
        rank: RemoteObject,
        facts: SnapshotFacts,
        *,
        is_here: bool,
        course: RankCourse,
        failure: Callable[[ClusterError], TrainerError],
    ) -> None:
        self._rank, self._number, self._course, self._failure = rank, facts.number, course, failure
        self.parts, self.checksum, self.not_finite = facts.parts, facts.checksum, facts.not_finite
        self.is_here = is_here
        identity = rank.identify()
        self.process = f"process {identity.pid} on {identity.node}"

    async def run(self, work: Work[R]) -> R:
        """Call `work` with the buckets, in a thread of the rank.

        Raises:
            TrainerError: the rank has gone.
        """
        return cast(R, await self._reply("run_work", pickled(work)))

    async def on_host(self) -> RankSnapshot:
        """Itself."""
        return self

    async def buckets(self) -> Sequence[Bucket]:
        """Copies of the buckets in this process.

        Raises:
            TrainerError: the rank has gone.
        """
        # One after the other: each is in the object store until this process has read it.
        arrays = [cast(Bytes, await self._reply("bytes_of", number)) for number in range(len(self.parts))]
        return [Bucket(part, bytes_B) for part, bytes_B in zip(self.parts, arrays, strict=True)]

    def free(self) -> None:
        """Have the rank free the memory, without waiting."""
        self._rank.call_concurrently("free_snapshot", self._number)

    async def _reply(self, method: str, argument: object) -> object:
        with self._course.concurrent(0) as receive:
            try:
                reply = receive(await self._rank.call_concurrently(method, self._number, argument).reply())
            except ClusterError as error:
                raise self._failure(error) from None
        if isinstance(reply, Refused):
            raise reply.error
        return reply
