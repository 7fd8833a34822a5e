"""An environment without cost: a tool that returns a text, and a graded answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl.envs import ToolEnv
from agentrl.tools import inline, tool
from agentrl.types import Limits, Task
from benchmarks.question import ANSWER, QUESTION, text_of

TASK = Task.ask("t", QUESTION, answer=ANSWER)


class Library(ToolEnv):
    """One tool that returns one of `texts`, after `wait_s` where that is above 0.

    work: squares that a call adds up first (count).
    """

    id = "Library-v0"
    limits = Limits(max_turns=4096, max_tokens=None, max_tool_chars=None)

    def __init__(self, texts: Sequence[str], wait_s: float = 0.0, work: int = 0) -> None:
        self._texts, self._wait_s, self._work, self._num_calls = texts, wait_s, work, 0
        self.tools = (self.look_after_a_wait,) if wait_s else (self.look,)
        super().__init__()

    @tool(name="look", inline=True)
    def look(self, where: str) -> str:
        """Look somewhere."""
        del where
        sum(number * number for number in range(self._work))
        return self._next_text()

    @tool(name="look")
    async def look_after_a_wait(self, where: str) -> str:
        """Look somewhere."""
        await asyncio.sleep(self._wait_s)
        del where
        return self._next_text()

    def tasks(self, split: str) -> Sequence[Task]:
        """One task, the same in every split."""
        del split
        return [TASK]

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """1.0 for the label, else 0.0."""
        return float(answer == task.answer)

    def _next_text(self) -> str:
        # Different texts for the episodes of a group, and for the turns of an episode.
        self._num_calls += 1
        return self._texts[(self.rng.getrandbits(16) + self._num_calls) % len(self._texts)]


class OneText(Library):
    """A library of a single text of `payload` characters."""

    id = "OneText-v0"

    def __init__(self, payload: int = 40) -> None:
        super().__init__([text_of(payload)])
