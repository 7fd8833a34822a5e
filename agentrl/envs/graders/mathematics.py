r"""The answer in a box, `\boxed{...}`, and its comparison with the label by math-verify."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.envs.graders.answer import after_thinking, answers_of, labels_of, last_boxed
from agentrl.envs.graders.notation import are_distinct, readable
from agentrl.errors import GradingError, UserError
from agentrl.processes import forking
from agentrl.runtime.extras import require
from agentrl.tools import Shared
from agentrl.types import RewardParts, Task

# A pool of processes that compare mathematical answers, each of which the kernel ends at its limits.
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


_MAX_BOX_CHARS = 2000
_MAX_PROCESSES = 8
_INTEGER = re.compile(r"[+-]?\d{1,1000}", re.ASCII)


def _opened() -> AbstractAsyncContextManager[MathPool]:
    return started(min(os.cpu_count() or 1, _MAX_PROCESSES))


_pool = Shared(_opened, "math-verify")


async def is_math_equal(answer: str, gold: str, *, timeout_s: float = 5.0) -> bool:
    r"""Whether the last box of an answer equals the label by math-verify; False without a box.

        await is_math_equal(r"It is \boxed{\frac{1}{2}}.", "0.5")

    gold: an expression, or a text with a box. timeout_s: CPU seconds of the comparison; its process is killed
    after that, and the answer counts as different.

    Waits for: a free process of the pool, which all callers of an event loop share, then the comparison. On
    cancellation: the comparison goes on to its end or its limit.

    Raises:
        MissingExtraError: math-verify is not installed.
        GradingError: the pool died twice.
    """
    return await compared(last_boxed(answer), gold, timeout_s) == "equal"


async def compared(boxed: str | None, gold: str, timeout_s: float) -> Outcome:
    """The comparison of a box's content with a label; `different` without a box."""
    expected = last_boxed(gold)
    expected = gold.strip() if expected is None else expected.strip()
    boxed = "" if boxed is None else boxed.strip()
    if boxed and boxed == expected:
        return "equal"
    if _INTEGER.fullmatch(boxed) and _INTEGER.fullmatch(expected):  # most answers
        return "equal" if int(boxed) == int(expected) else "different"
    is_long = max(len(boxed), len(expected)) > _MAX_BOX_CHARS
    if not (boxed and expected) or is_long or are_distinct(boxed, expected):
        return "different"
    require("grading math", "math_verify")
    pair = readable(boxed, expected), readable(expected, boxed)
    pool = await _pool.get()
    try:
        return await pool.compare(*pair, timeout_s)
    except GradingError:
        await _pool.drop(pool)
        return await (await _pool.get()).compare(*pair, timeout_s)


@dataclass(frozen=True, kw_only=True)
class MathGrader:
    r"""1.0 where the answer's last `\boxed{...}` equals the label by math-verify, else 0.0.

    The part `grader_timeout` is 1 where the comparison was killed at its limit, or crashed: such an answer
    gets 0.0.

    timeout_s: CPU seconds of one comparison.
    after_think: whether only a box after the last `</think>` counts, and an answer without one gets 0.0.

    Raises:
        MissingExtraError: math-verify is not installed.
        UserError: the timeout is not above 0.
    """

    timeout_s: float = 5.0
    after_think: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= 3600:
            raise UserError(f"a math grader needs a timeout_s above 0, at most 3600, got {self.timeout_s}.")
        require("grading math", "math_verify")

    def expert_answer(self, task: Task) -> str | None:
        """A label in a box, for which the grade is 1.0; None where no label can be in one."""
        begin = "</think>\n" if self.after_think else ""
        for gold in answers_of(task):
            boxed = last_boxed(gold)
            expected = (gold if boxed is None else boxed).strip()
            if expected and last_boxed(rf"\boxed{{{expected}}}") == expected:
                return rf"{begin}\boxed{{{expected}}}"
        return None

    async def grade(self, task: Task, answer: str) -> RewardParts:
        """The grade of an answer.

        Raises:
            GradingError: the task has no label, or the pool of processes died twice.
        """
        final = after_thinking(answer) if self.after_think else answer
        boxed = None if final is None else last_boxed(final)
        outcomes: list[Outcome] = []
        for gold in labels_of(task):
            outcomes.append(await compared(boxed, gold, self.timeout_s))
            if outcomes[-1] == "equal":
                break
        killed = "equal" not in outcomes and bool({"timeout", "crashed"} & {*outcomes})
        return RewardParts({"grader_timeout": float(killed)}, total=float("equal" in outcomes))


@dataclass(frozen=True, kw_only=True)
class DeepScalerGrader(MathGrader):
    r"""1.0 where the last `\boxed{...}` after the last `</think>` equals the label by math-verify, else 0.0.

    An answer without `</think>` gets 0.0. Where the chat dialect parses the reasoning out of the answer, take
    the grader `math`. The settings are those of the grader `math`.
    """

    after_think: bool = True
