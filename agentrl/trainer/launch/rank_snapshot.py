"""A version of the weights that a rank keeps in its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast
from weakref import ReferenceType, ref

from agentrl.errors import RemoteError, TrainerError
from agentrl.processes.remote import PendingCall, Remote
from agentrl.trainer.launch.course import RankCourse
from agentrl.trainer.launch.messages import pickled
from agentrl.trainer.launch.rank import RankProcess, SnapshotFacts
from agentrl.trainer.launch.shared_buffers import Bytes, SharedBytes, received
from agentrl.types.seams import Bucket, Work

R = TypeVar("R")


class RankSnapshot:
    """A snapshot in rank 0; see `Snapshot`. Its calls run beside those of the rank's worker, so that a server
    that is restarted in the middle of a training step gets its weights at once.

    course: of all ranks. failure: the error of the rank, from that of its process.
    """

    device = None

    def __init__(
        self,
        rank: Remote[RankProcess],
        facts: SnapshotFacts,
        *,
        course: RankCourse,
        failure: Callable[[RemoteError], TrainerError],
    ) -> None:
        self._rank, self._number, self._course, self._failure = rank, facts.number, course, failure
        self.parts, self.checksum, self.not_finite = facts.parts, facts.checksum, facts.not_finite
        self.is_here, self.process = rank.is_here, rank.process
        self._mapped: dict[int, ReferenceType[Bytes]] = {}

    async def run(self, work: Work[R]) -> R:
        """Call `work` with the buckets, in a thread of the rank; raises what it raises.

        Raises:
            TrainerError: the rank has gone.
        """
        call = self._rank.call_beside(RankProcess.run_work, self._number, pickled(work))
        with self._course.concurrent(0) as receive:
            return cast(R, receive(await self._reply(call)))

    async def on_host(self) -> RankSnapshot:
        """Itself."""
        return self

    async def buckets(self) -> Sequence[Bucket]:
        """The buckets in this process: of a rank on this machine their memory, of another one copies.

        Raises:
            TrainerError: the rank has gone.
        """
        buckets: list[Bucket] = []
        for number, part in enumerate(self.parts):
            # One after the other: a copy is in the object store until this process has read it.
            data = await self._data_of(number)
            try:
                buckets.append(received(part, data))
            except FileNotFoundError:
                # The rank has gone since its reply, and the memory with it: any further call says how.
                await self._data_of(number)
                raise
            if buckets[-1].file is not None:
                self._mapped[number] = ref(buckets[-1].data)
        return buckets

    def free(self) -> None:
        """Have the rank free the memory, without waiting; what this process still uses stays as it is."""
        in_use = [number for number, data in self._mapped.items() if data() is not None]
        self._rank.call_beside(RankProcess.free_snapshot, self._number, in_use)

    async def _data_of(self, number: int) -> SharedBytes | Bytes:
        return await self._reply(self._rank.call_beside(RankProcess.data_of, self._number, number))

    async def _reply(self, call: PendingCall[R]) -> R:
        try:
            return await call.reply()
        except RemoteError as error:
            raise self._failure(error) from None
