"""An environment that records when an episode begins; benchmarks/checkpoint.py resumes a run of it."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agentrl.envs import SingleTurnEnv
from agentrl.types import JSON, Limits, Observation, Task

HOLD = "AGENTRL_BENCH_HOLD"
"""The variable of a process in which no episode goes on after its reset."""


class Stamped(SingleTurnEnv):
    """A question whose answers have random rewards. stamp: a file that every reset creates."""

    limits = Limits(max_turns=1, max_tokens=64, reset_timeout_s=3600.0)

    def __init__(self, stamp: str) -> None:
        super().__init__()
        self._stamp = Path(stamp)

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Create the stamp; return the question."""
        self._stamp.touch()
        if HOLD in os.environ:
            await asyncio.Event().wait()
        return await super().reset(task, seed=seed)

    def tasks(self, split: str) -> Sequence[Task]:
        """Two tasks."""
        return [Task.ask(f"{split}{number}", f"question {number}") for number in range(2)]

    def corpus(self) -> Iterable[str]:
        """The text for the tokenizer."""
        return ["question 0", "question 1"]

    def grade(self, task: Task, answer: str) -> float:
        """A random number, so that siblings differ."""
        del task, answer
        return random.random()
