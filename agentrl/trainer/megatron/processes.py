"""The trainer's ranks as processes on this machine: all of them, or none.

consumes: calls, one at a time, the same for all ranks. waits for: every rank's answer. unblocked by: the
answers, or the end of any rank, which ends the others. on shutdown: `close` asks them to end, and kills those
that do not. A rank whose driver dies finds its pipe closed, and ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple, NoReturn

from agentrl.errors import TrainerError
from agentrl.trainer.megatron.calls import Part
from agentrl.trainer.megatron.plan import Plan

_END_S = 5.0


class _Rank(NamedTuple):
    """inbox: what it has said and nobody has asked for yet."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    inbox: deque[object]
    log: Path


class Processes:
    """One process for each rank of the plan. folder: for what they print, rank-0.log and so on.

    Raises:
        TrainerError: a rank does not come up.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._meeting = tempfile.TemporaryDirectory(prefix="agentrl-ranks-")
        meeting = f"file://{Path(self._meeting.name) / 'meeting'}"
        self._ranks = [
            _started(folder / f"rank-{number}.log") for number in range(plan.layout.actor_num_gpus_per_node)
        ]
        for number in range(len(self._ranks)):
            self._send(number, (plan, number, meeting))
        for number in range(len(self._ranks)):
            self._next(number)

    @property
    def pids(self) -> list[int]:
        """The processes, in the order of the ranks."""
        return [rank.process.pid for rank in self._ranks]

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method of every rank's `Worker`; what each answers, in the order of the ranks.

        Raises:
            TrainerError: a rank failed or died; the others have been ended.
        """
        for number in range(len(self._ranks)):
            self._send(number, (method, args))
        return [self._next(number) for number in range(len(self._ranks))]

    def stream(self, method: str, *args: object) -> Iterator[object]:
        """What a method of rank 0 yields, one at a time, while all others go along; take it to its end.

        Raises:
            TrainerError: a rank failed or died; the others have been ended.
        """
        for number in range(len(self._ranks)):
            self._send(number, (method, args))
        while isinstance(part := self._next(0), Part):
            yield part.value
        for number in range(1, len(self._ranks)):
            while isinstance(self._next(number), Part):
                pass

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.pipe.close()
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(_END_S)
        self._end_all()
        self._meeting.cleanup()

    def _send(self, number: int, said: object) -> None:
        try:
            self._ranks[number].pipe.send(said)
        except OSError:
            self._give_up(number)

    def _next(self, number: int) -> object:
        """What a rank says next. All are listened to: any may fail, and leave the others waiting."""
        inbox = self._ranks[number].inbox
        while not inbox:
            ready = wait([rank.pipe for rank in self._ranks])
            for speaker, rank in enumerate(self._ranks):
                if rank.pipe not in ready:
                    continue
                try:
                    rank.inbox.append(rank.pipe.recv())
                except (EOFError, OSError):
                    self._give_up(speaker)
        return inbox.popleft()

    def _give_up(self, number: int) -> NoReturn:
        with suppress(subprocess.TimeoutExpired):
            self._ranks[number].process.wait(_END_S)
        # A rank may have failed only because it waited for one that was killed.
        killed = [n for n, rank in enumerate(self._ranks) if (rank.process.poll() or 0) < 0]
        number = killed[0] if killed else number
        process, log = self._ranks[number].process, self._ranks[number].log
        self._end_all()
        code = process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {said[-1].strip().removeprefix(f'[rank{number}]: ')[:300]}" if said and code > 0 else ""
        raise TrainerError(
            f"rank {number} of the trainer (process {process.pid}) {how}{last}; the others were ended, "
            f"too (see {log})."
        )

    def _end_all(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()


def _started(log: Path) -> _Rank:
    ours, theirs = Pipe()
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentrl.trainer.megatron.rank", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
    # The rank alone holds its end: when it is gone, ours tells.
    theirs.close()
    return _Rank(process, ours, deque(), log)
