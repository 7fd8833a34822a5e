"""The trainer's ranks as processes: all of them, or none.

consumes: calls, one at a time, the same for all ranks. waits for: every rank's reply. unblocked by: the
replies, or the end of any rank, which ends the others. on shutdown: `close` closes the pipes, and kills the
ranks that do not end. A rank whose driver is killed reads the end of its pipe, and ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import NoReturn, TypeVar
from weakref import ReferenceType, ref

from agentrl.errors import TrainerError
from agentrl.processes.child import ProcessFailure
from agentrl.processes.gpus import check_gpus
from agentrl.trainer.launch.background import Background
from agentrl.trainer.launch.calls import BEGIN, IMPORT
from agentrl.trainer.launch.child_rank import ChildRank
from agentrl.trainer.launch.course import RankCourse
from agentrl.trainer.launch.messages import pickled, pickled_plan
from agentrl.trainer.launch.phases import Entered
from agentrl.trainer.launch.rank_plan import RankPlan
from agentrl.trainer.launch.rendezvous import LOOPBACK, RankStore
from agentrl.trainer.launch.shared_buffers import Bytes, receive
from agentrl.types.seams import Bucket
from agentrl.weights.snapshot import LocalSnapshot

_FAILURE_WAIT_S = 1.0

R = TypeVar("R")


class Processes:
    """One process for each rank. folder: for their output, rank-0.log and so on.

    preloaded: the module with their worker, which they import at once; `begin` sends them the plan.
    gpus: those of each rank, as in CUDA_VISIBLE_DEVICES; left out, they share those of this process out.

    Raises:
        ConfigError: this machine has GPUs, but not one for each rank.
    """

    def __init__(
        self, world_size: int, folder: Path, *, preloaded: str, gpus: Sequence[Sequence[str]] = ()
    ) -> None:
        if world_size > 1:
            check_gpus(world_size)
        folder.mkdir(parents=True, exist_ok=True)
        self._background = Background(self.end)
        self._course = RankCourse(world_size)
        self._failure: str | None = None
        self._last_bucket: ReferenceType[Bytes] | None = None
        self._store = RankStore(LOOPBACK)
        self._ranks: Sequence[ChildRank] = [
            ChildRank(folder / f"rank-{number}.log", number, preloaded, own)
            for number, own in enumerate(gpus or [()] * world_size)
        ]
        self._course.begin(IMPORT)
        for number in range(len(self._ranks)):
            self._ranks[number].num_pending = 1
            self._send(number, pickled((number, self._store.rendezvous)))

    @property
    def pids(self) -> list[int]:
        """The processes, in the order of the ranks."""
        return [rank.pid for rank in self._ranks]

    @property
    def where(self) -> list[str]:
        """Their processes, in the order of the ranks."""
        return [rank.where for rank in self._ranks]

    def imported(self) -> None:
        """Wait until every rank has imported its worker; nothing is on a GPU yet.

        Raises:
            TrainerError: a rank failed, or was killed; the others have been ended.
        """
        self._check()
        self._course.wait()

    def begin(self, plan: RankPlan) -> None:
        """Send every rank a plan; the worker of the previous plan is closed.

        Raises:
            ConfigError: the plan holds what no other process can import.
            TrainerError: a rank failed.
        """
        if plan.world_size != len(self._ranks):
            raise ValueError(f"the plan is for {plan.world_size} ranks, and there are {len(self._ranks)}")
        self._send_to_all(BEGIN, pickled_plan((BEGIN, (plan,))))
        self._replies()

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method of every rank's `Worker`; the replies, in the order of the ranks.

        Raises:
            TrainerError: a rank failed or was killed, now or before; the others have been ended.
        """
        self._send_to_all(method, pickled((method, args)))
        return self._replies()

    def stream(self, method: str, *args: object) -> Generator[Bucket, None, object]:
        """Buckets of rank 0, one at a time, while all other ranks run the method, too; exhaust it.

        The memory of a bucket is reused if nothing references the bucket when the next one is taken.

        Returns:
            what the method of rank 0 returned.

        Raises:
            TrainerError: a rank failed or was killed; the others have been ended.
        """
        self._send_to_all(method, pickled((method, args)))
        while isinstance(bucket := self._next_message(0), Bucket):
            yield bucket
            del bucket
        self._replies(first=1)
        return bucket

    def snapshot(self, method: str, *args: object) -> LocalSnapshot:
        """All buckets of the stream, which this process has mapped.

        Raises:
            TrainerError: a rank failed or was killed; the others have been ended.
        """
        return LocalSnapshot.of_stream(self.stream(method, *args))

    async def run(self, function: Callable[..., R], *args: object) -> R:
        """Run a function that makes such calls in a thread (see `Background`)."""
        return await self._background.run(function, *args)

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            rank.wait()
            rank.kill()
        self._course.end()

    def end(self) -> None:
        """End all ranks at once; a thread that waits for their replies gets the error."""
        for rank in self._ranks:
            rank.end()

    def _check(self) -> None:
        """Read what earlier calls have left: their imports, or the replies of an interrupted call.

        Raises:
            TrainerError: the ranks have ended.
        """
        if self._failure is not None:
            raise TrainerError(self._failure)
        for number in range(len(self._ranks)):
            self._discard_pending(number)

    def _send_to_all(self, method: str, call: bytes) -> None:
        self._check()
        self._course.begin(method)
        for number in range(len(self._ranks)):
            self._ranks[number].num_pending += 1
            self._send(number, call)

    def _replies(self, first: int = 0) -> list[object]:
        """The replies of the ranks from `first` on, with which their call ends."""
        replies = [self._next_message(number) for number in range(first, len(self._ranks))]
        self._course.wait()
        return replies

    def _discard_pending(self, number: int) -> None:
        while self._ranks[number].num_pending:
            self._next_message(number)

    def _send(self, number: int, message: bytes) -> None:
        try:
            self._ranks[number].pipe.send_bytes(message)
        except OSError:
            self._fail(number)

    def _next_message(self, number: int) -> object:
        """The next message of a rank. All pipes are read: any rank may fail, and the others then block."""
        rank = self._ranks[number]
        self._acknowledge_bucket()
        while not rank.inbox:
            if failed := self._receive():
                self._fail(failed[0])
        message = rank.inbox.popleft()
        if isinstance(message, Bucket):
            self._last_bucket = ref(message.data)
        else:
            rank.num_pending -= 1
        return self._course.receive(number, message)

    def _acknowledge_bucket(self) -> None:
        """Send rank 0, which waits for it, whether the last bucket is free to be filled again."""
        data, self._last_bucket = self._last_bucket, None
        if data is not None:
            # A closed pipe shows when it is read.
            with suppress(OSError):
                self._ranks[0].pipe.send(data() is None)

    def _receive(self, timeout_s: float | None = None) -> list[int]:
        """Read one message of each rank that sent one; the ranks that failed or closed their pipe."""
        ready = wait([rank.pipe for rank in self._ranks if not rank.is_closed], timeout_s)
        failed = []
        for number, rank in enumerate(self._ranks):
            if rank.pipe not in ready:
                continue
            try:
                message = receive(rank.pipe)
            except (EOFError, OSError):
                rank.is_closed = True
                failed.append(number)
                continue
            if isinstance(message, ProcessFailure):
                rank.failure = message
                failed.append(number)
            elif isinstance(message, Entered):
                self._course.enter(number, message.phase)
            else:
                rank.inbox.append(message)
        return failed

    def _fail(self, number: int) -> NoReturn:
        """End all ranks, and name the first that failed; `number` where none reports more."""
        deadline = time.monotonic() + _FAILURE_WAIT_S
        # A rank may have failed only because it waited for one that was killed, which reports nothing.
        while (killed := self._first_killed()) is None and (remaining_s := deadline - time.monotonic()) > 0:
            self._receive(remaining_s)
        culprit = self._first_failed(number) if killed is None else killed
        rank = self._ranks[culprit]
        why = f": {rank.failure.error}" if rank.failure else ""
        self._failure = (
            f"rank {culprit} of the trainer ({rank.where}) {rank.exit_reason()}{why}; the others were ended, "
            f"too (see {rank.log})."
        )
        for other in self._ranks:
            other.kill()
        self._course.end()
        raise TrainerError(self._failure)

    def _first_failed(self, number: int) -> int:
        """The first of the ranks that reported a failure: it may have caused the others."""
        failed = {n: rank.failure.at_s for n, rank in enumerate(self._ranks) if rank.failure is not None}
        return min(failed, key=failed.__getitem__, default=number)

    def _first_killed(self) -> int | None:
        """The first rank whose pipe closed without a report of a failure."""
        return next((n for n, rank in enumerate(self._ranks) if rank.is_closed and not rank.failure), None)
