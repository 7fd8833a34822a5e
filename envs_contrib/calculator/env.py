"""The environment of the word problems: a calculator as tool, reward 1 for the right number."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from agentrl import Limits, Message, Script, Task, ToolEnv, UserError, call, say, tool
from agentrl.tools import calculate, inline
from envs_contrib.calculator.problems import MAX_STEPS, NUM_PROBLEMS, OPERATORS, Problem, problems

NO_TOOL = 0.15
"""Demonstrations that answer without a call, with a number of the question."""
WRONG_OPERATOR = 0.20
"""Demonstrated calls with another operator than the right one."""
EARLY_STOP = 0.20
"""Demonstrated results, except the last one, that become the answer."""


@tool(inline=True)
def calc(expression: str) -> str:
    """Compute an expression such as 12*7 exactly."""
    return calculate(expression)


class Calculator(ToolEnv):
    """Word problems of one to three steps; each step is one call on the result of the previous one.

    max_calls: only the problems of at most so many steps.

    Raises:
        UserError: max_calls is not from 1 to 3.
    """

    group = "math"
    breakdown = "calls"
    splits = ("demo", "train", "validation", "test")
    limits = Limits(max_turns=5, max_tokens=224)
    tools = (calc,)

    def __init__(self, seed: int = 0, max_calls: int = MAX_STEPS) -> None:
        super().__init__()
        if not 1 <= max_calls <= MAX_STEPS:
            raise UserError(f"max_calls is {max_calls}; problems take 1 to {MAX_STEPS} calls.")
        self.seed, self.max_calls = seed, max_calls

    def tasks(self, split: str) -> Sequence[Task]:
        """The problems of a split: demo, train, validation or test.

        Raises:
            UserError: no such split.
        """
        return _tasks(self.seed, split, self.max_calls)

    @inline
    def reward(self, task: Task, answer: str) -> float:
        """1.0 for the right number, written as digits."""
        return float(answer.strip() == task.answer)

    @inline
    def save_state(self) -> Mapping[str, str]:
        """Nothing: calls change no state."""
        return {}

    def expert(self, task: Task) -> Script:
        """One call per step, then the last result."""
        steps = _steps(task)
        result = str(task.metadata["start"])
        for operator, number in steps:
            result = yield call("calc", expression=f"{result}{operator}{number}")
        yield say(result)

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The expert with the errors whose rates the constants above set."""
        return _noisy(task, random.Random(rng.getrandbits(64)))

    def corpus(self) -> Iterable[str]:
        """The demonstration problems."""
        for task in self.tasks("demo"):
            yield from (message.text for message in task.prompt)


def _noisy(task: Task, rng: random.Random) -> Script:
    if rng.random() < NO_TOOL:
        yield say(rng.choice(re.findall(r"\d+", task.prompt[0].text)))
        return
    steps = _steps(task)
    result = str(task.metadata["start"])
    for number_of_step, (operator, number) in enumerate(steps, start=1):
        wrong = rng.random() < WRONG_OPERATOR
        chosen = rng.choice(OPERATORS.replace(operator, "")) if wrong else operator
        result = yield call("calc", expression=f"{result}{chosen}{number}")
        if number_of_step < len(steps) and rng.random() < EARLY_STOP:
            break
    yield say(result)


def _steps(task: Task) -> list[tuple[str, str]]:
    """The operators and numbers of a task, in order."""
    return [(text[0], text[1:]) for text in str(task.metadata["steps"]).split()]


@lru_cache(maxsize=32)
def _tasks(seed: int, split: str, max_calls: int) -> tuple[Task, ...]:
    if split not in NUM_PROBLEMS:
        raise UserError(f"Calculator has no split `{split}`; it has {', '.join(NUM_PROBLEMS)}.")
    return tuple(
        _task(f"{split}-{number}", problem, split)
        for number, problem in enumerate(problems(seed, split))
        if len(problem.operations) <= max_calls
    )


def _task(id: str, problem: Problem, split: str) -> Task:
    steps = " ".join(f"{operator}{number}" for operator, number in problem.operations)
    metadata: Mapping[str, str | int] = {
        "start": problem.start,
        "steps": steps,
        "calls": len(problem.operations),
    }
    return Task(id, (Message("user", problem.text),), str(problem.answer), metadata, split)
