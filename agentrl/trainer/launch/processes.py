"""The trainer's ranks as processes: all of them, or none.

consumes: calls, one at a time, the same for all ranks. waits for: every rank's answer. unblocked by: the
answers, or the end of any rank, which ends the others. on shutdown: `close` asks them to end, and kills those
that do not. A rank whose driver dies finds its pipe closed, and ends.
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
from agentrl.gpus import check_gpus
from agentrl.processes import Failed
from agentrl.protocols import Bucket
from agentrl.trainer.launch.background import Background
from agentrl.trainer.launch.calls import BEGIN
from agentrl.trainer.launch.launched import LaunchedRanks
from agentrl.trainer.launch.meeting import Meeting, kept
from agentrl.trainer.launch.members import Member, Own
from agentrl.trainer.launch.messages import pickled, pickled_plan
from agentrl.trainer.launch.shared_buffers import Bytes, received
from agentrl.trainer.launch.work import Work

_LAST_WORDS_S = 1.0

R = TypeVar("R")


class Processes:
    """One process for each rank. folder: for what they print, rank-0.log and so on.

    preloaded: the module with their worker, which they import at once; `begin` gives them work.
    launched: the ranks that a launcher started, all but rank 0; without, all are processes on this machine.

    Raises:
        ConfigError: this machine has GPUs, but not one for each rank.
    """

    def __init__(
        self, world_size: int, folder: Path, *, preloaded: str, launched: LaunchedRanks | None = None
    ) -> None:
        if launched is None and world_size > 1:
            check_gpus(world_size)
        folder.mkdir(parents=True, exist_ok=True)
        self._background = Background(self._kill)
        self._failure: str | None = None
        self._seen: ReferenceType[Bytes] | None = None
        first, others = (0, ()) if launched is None else (launched.seat.local, launched.members)
        if launched is None:
            self._store = kept("127.0.0.1", 0)
        meeting = Meeting("127.0.0.1", self._store.port, "ranks") if launched is None else launched.meeting
        self._ranks: Sequence[Member] = [
            *(Own(folder / f"rank-{n}.log", first + n, preloaded) for n in range(world_size - len(others))),
            *others,
        ]
        for number in range(len(self._ranks)):
            self._send(number, pickled((number, meeting)))

    @property
    def pids(self) -> list[int]:
        """The processes, in the order of the ranks."""
        return [rank.pid for rank in self._ranks]

    def begin(self, plan: Work) -> None:
        """Have every rank work on a plan; what it worked on before is gone.

        Raises:
            ConfigError: the plan holds what no other process can import.
            TrainerError: a rank failed.
        """
        if plan.world_size != len(self._ranks):
            raise ValueError(f"the plan is for {plan.world_size} ranks, and there are {len(self._ranks)}")
        self._ask(pickled_plan((BEGIN, (plan,))))
        for number in range(len(self._ranks)):
            self._next(number)

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method of every rank's `Worker`; what each answers, in the order of the ranks.

        Raises:
            TrainerError: a rank failed or died, now or before; the others have been ended.
        """
        self._ask(pickled((method, args)))
        return [self._next(number) for number in range(len(self._ranks))]

    def stream(self, method: str, *args: object) -> Generator[Bucket, None, object]:
        """Buckets of rank 0, one at a time, while all others go along; take it to its end.

        A bucket that was let go of before the next is asked for leaves its memory to a later one.

        Returns:
            what the method of rank 0 returned.

        Raises:
            TrainerError: a rank failed or died; the others have been ended.
        """
        self._ask(pickled((method, args)))
        while isinstance(bucket := self._next(0), Bucket):
            yield bucket
            del bucket
        for number in range(1, len(self._ranks)):
            self._next(number)
        return bucket

    async def run(self, function: Callable[..., R], *args: object) -> R:
        """Run a function that makes such calls in a thread: see `Background`."""
        return await self._background.run(function, *args)

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            rank.wait()
            rank.kill()

    def _kill(self) -> None:
        """End all ranks at once; whoever waits for them meets their end."""
        for rank in self._ranks:
            rank.end()

    def _ask(self, call: bytes) -> None:
        if self._failure is not None:
            raise TrainerError(self._failure)
        # Whoever was interrupted in a call has left its answers.
        for number in range(len(self._ranks)):
            self._settle(number)
        for number in range(len(self._ranks)):
            self._ranks[number].owes += 1
            self._send(number, call)

    def _settle(self, number: int) -> None:
        while self._ranks[number].owes:
            self._next(number)

    def _send(self, number: int, message: bytes) -> None:
        try:
            self._ranks[number].pipe.send_bytes(message)
        except OSError:
            self._give_up(number)

    def _next(self, number: int) -> object:
        """What a rank says next. All are listened to: any may fail, and leave the others waiting."""
        rank = self._ranks[number]
        self._through_with_a_bucket()
        while not rank.inbox:
            if failed := self._listen():
                self._give_up(failed[0])
        said = rank.inbox.popleft()
        if isinstance(said, Bucket):
            self._seen = ref(said.data)
        else:
            rank.owes -= 1
        return said

    def _through_with_a_bucket(self) -> None:
        """Tell rank 0, which waits for it, whether anybody keeps the last bucket."""
        seen, self._seen = self._seen, None
        if seen is not None:
            # Whether it is still there shows when it is listened to.
            with suppress(OSError):
                self._ranks[0].pipe.send(seen() is None)

    def _listen(self, timeout_s: float | None = None) -> list[int]:
        """Hear what some ranks say; those who will say no more."""
        ready = wait([rank.pipe for rank in self._ranks if not rank.gone], timeout_s)
        failed = []
        for number, rank in enumerate(self._ranks):
            if rank.pipe not in ready:
                continue
            try:
                said = received(rank.pipe)
            except (EOFError, OSError):
                rank.gone = True
                failed.append(number)
                continue
            if isinstance(said, Failed):
                rank.word = said
                failed.append(number)
            else:
                rank.inbox.append(said)
        return failed

    def _give_up(self, number: int) -> NoReturn:
        """End all of them, and name the one that began it; `number` where nobody says more."""
        deadline = time.monotonic() + _LAST_WORDS_S
        # A rank may have failed only because it waited for one that was killed, and said nothing.
        while (silent := self._silent()) is None and (left_s := deadline - time.monotonic()) > 0:
            self._listen(left_s)
        culprit = self._first_word(number) if silent is None else silent
        rank = self._ranks[culprit]
        why = f": {rank.word.why}" if rank.word else ""
        self._failure = (
            f"rank {culprit} of the trainer ({rank.where}) {rank.fate()}{why}; the others were ended, "
            f"too (see {rank.log})."
        )
        for one in self._ranks:
            one.kill()
        raise TrainerError(self._failure)

    def _first_word(self, number: int) -> int:
        """Of those who said that they failed, the first: the others may have, because of it."""
        failed = {n: rank.word.at_s for n, rank in enumerate(self._ranks) if rank.word is not None}
        return min(failed, key=failed.__getitem__, default=number)

    def _silent(self) -> int | None:
        """The first that has gone without a word."""
        return next((n for n, rank in enumerate(self._ranks) if rank.gone and not rank.word), None)
