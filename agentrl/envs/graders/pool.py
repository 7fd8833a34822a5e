"""A pool of processes that compare mathematical answers, each of which the kernel ends at its limits."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from agentrl.errors import GradingError
from agentrl.processes import forking

Outcome = Literal["equal", "different", "timeout", "crashed"]
"""`timeout`: the comparison was killed at its limit. `crashed`: the answer made the process crash."""

_PROGRAM = Path(__file__).parent / "inside" / "compare.py"
_MEMORY_MB = 1024
_FROM_OUTSIDE: Mapping[int, str] = {
    signal.SIGKILL: "was killed from outside, or memory ran out",
    signal.SIGALRM: "got too little CPU time on a busy machine",
}


class MathPool:
    """Processes that compare one pair of expressions at a time. Start one with `started`."""

    def __init__(self, workers: forking.Workers) -> None:
        self._workers = workers

    async def compare(self, answer: str, gold: str, cpu_s: float) -> Outcome:
        """Whether math-verify takes two expressions for equal.

        cpu_s: CPU seconds of the comparison; limits, waiting and cancellation are those of `Workers.reply`.

        Raises:
            GradingError: the pool died, or the machine is too busy.
        """
        try:
            reply = await self._workers.reply(json.dumps([answer, gold]).encode(), cpu_s)
        except (OSError, EOFError) as error:
            reason = str(error) or type(error).__name__
            raise GradingError("crashed", f"the processes of math-verify died: {reason}") from error
        if not isinstance(reply, forking.Death):
            return "equal" if reply == b"equal" else "different"
        if reply.is_from_outside:
            raise GradingError("crashed", f"a process of math-verify {_FROM_OUTSIDE[reply.signum]}")
        return "timeout" if reply.is_late else "crashed"


@asynccontextmanager
async def started(processes: int) -> AsyncIterator[MathPool]:
    """Start a pool; leaving the context ends every process of it.

    processes: comparisons at a time.
    """
    async with forking.started(_PROGRAM, processes, memory_mb=_MEMORY_MB, setup=b"") as workers:
        yield MathPool(workers)
