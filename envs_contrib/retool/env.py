"""The environment: Python with state, answers in a box."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Literal, cast, get_args

from agentrl import Limits, Message, Script, Tags, Task, Text, ToolEnv, ToolRejected, UserError, call, say
from agentrl.envs.graders import last_boxed, make_grader
from agentrl.tools import JSON, PythonTool, Tool, Toolkit, ToolSchema, make_tool
from envs_contrib.retool.problem import LEVELS, Level, Problem
from envs_contrib.retool.problems import NUM_PROBLEMS, problems

Form = Literal["tags", "chat"]

ANSWER_AT_ONCE = 0.15
"""Demonstrations of easy problems that answer with a number of the question, without a program."""
STOP_AFTER_FIRST_CELL = 0.65
"""Demonstrated problems of two cells that are answered with the result of the first one."""
WRONG_CELL = 0.30
"""Demonstrated cells that compute something else: see `wrong_cell`."""
WRONG_NUMBER = 0.09
"""Demonstrated answers that are a number of the question instead of the result."""

_INSTRUCTIONS: Mapping[Form, str] = {
    "tags": (
        "Solve the problem. You can run Python: write a program between <code> and </code>, and what it "
        "prints comes back between <interpreter> and </interpreter>. Variables stay for your next programs. "
        "Write the final answer last, as <answer>\\boxed{...}</answer>."
    ),
    "chat": (
        "Solve the problem. You can run Python with the tool `python`, which returns what a program prints. "
        "Variables stay for your next programs. End with the final answer in \\boxed{...}."
    ),
}
_TOOL_NAMES: Mapping[Form, str] = {"tags": "code", "chat": "python"}
_ANSWER_LINE = re.compile(r"\banswer\s*:[ \t]*([^\n]+)", re.IGNORECASE)


class ReTool(ToolEnv):
    r"""Math problems with Python in the sandbox, whose variables stay, and the answer in \boxed{}.

    Its own problems come from a seeded generator of three levels; those of `prompt_data` are texts with an
    answer, such as those of AIME or DAPO. The reward is 1 for the right answer in the last box, by the grader
    `math`, and 0 otherwise: no call is paid for, and a program that hangs, crashes or floods the tool earns
    nothing.

    level: easy, medium or hard; None = all three.
    form: `tags`, ReTool's own (arXiv:2504.11536), or `chat`, for runs with the chat dialect, where the tool
        is called `python`.
    instructions: whether the prompt explains the form.
    python: arguments of `PythonTool`, such as {"packages": ["sympy"], "wall_s": 20}.
    silent: the control of a comparison: programs run, and their output is withheld.
    seed: of the problems.

    Raises:
        UserError: there is no such level or form, or the tool does not take these arguments.
    """

    group = "math"
    needs = ("sandbox", "math")
    breakdown = "kind"
    splits = tuple(NUM_PROBLEMS)
    limits = Limits(max_turns=8, max_tokens=4096)
    dialect = Tags.retool()

    def __init__(
        self,
        level: Level | None = None,
        *,
        form: Form = "tags",
        instructions: bool = True,
        python: Mapping[str, JSON] | None = None,
        silent: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if level is not None and level not in LEVELS:
            raise UserError(f"ReTool has no level `{level}`; it has {', '.join(LEVELS)}.")
        if form not in get_args(Form):
            raise UserError(f"ReTool has no form `{form}`; write `tags` or `chat`.")
        self.levels: tuple[Level, ...] = LEVELS if level is None else (level,)
        self.seed = seed
        self._instructions = f"{_INSTRUCTIONS[form]}\n\n" if instructions else ""
        self._tool_name = _TOOL_NAMES[form]
        self._grade = make_grader("math")
        arguments = {"stateful": True, "wall_s": 5.0, "cpu_s": 5.0, **(python or {}), "name": self._tool_name}
        tool = _python_tool(json.dumps(arguments, sort_keys=True))
        self.offer(_Silent(tool) if silent else tool)

    def tasks(self, split: str) -> Sequence[Task]:
        """The problems of a split: demo, train, validation or test.

        Raises:
            UserError: no such split.
        """
        if split not in NUM_PROBLEMS:
            raise UserError(f"ReTool has no split `{split}`; it has {', '.join(NUM_PROBLEMS)}.")
        return _tasks(self.seed, self.levels, split)

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Open the tool, and return the problem with the instructions.

        Raises:
            ToolError: the sandbox cannot be opened.
        """
        prompt, info = await super().reset(task, seed=seed)
        return _with_prefix(prompt, self._instructions), info

    async def reward(self, task: Task, answer: str) -> float:
        """1.0 for a right answer in the last box; of several answers of a task each is right.

        Where the task's own text asks for a line `Answer: ...`, as DAPO's do, that line counts, too.

        Raises:
            GradingError: the task has no answer.
        """
        if last_boxed(answer) is None and any(_ANSWER_LINE.search(message.text) for message in task.prompt):
            lines = _ANSWER_LINE.findall(answer)
            answer = boxed_answer(lines[-1].strip()) if lines else ""
        return cast(float, await cast(Awaitable[object], self._grade(task, answer)))

    def expert(self, task: Task) -> Script:
        """Runs the cells of the problem, then boxes the last result.

        Raises:
            UserError: the task is not one of the environment's own.
        """
        return self._solve(_cells(task))

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """The expert; for easy problems with the errors whose rates the constants above set."""
        if task.metadata.get("level") != "easy":
            return self.expert(task)
        return self._err(task, random.Random(rng.getrandbits(64)))

    def corpus(self) -> Iterable[str]:
        """The demonstration problems, with the text of the expert's actions."""
        for task in self.tasks("demo"):
            yield from (message.text for message in _with_prefix(task.prompt, self._instructions))
            yield from _cells(task)
            yield boxed_answer(task.answer or "")

    def _solve(self, cells: Sequence[str]) -> Script:
        result = ""
        for cell in cells:
            result = yield call(self._tool_name, code=cell)
        yield say(boxed_answer(result))

    def _err(self, task: Task, rng: random.Random) -> Script:
        cells, numbers = _cells(task), re.findall(r"\d+", task.prompt[-1].text)
        if rng.random() < ANSWER_AT_ONCE:
            yield say(boxed_answer(rng.choice(numbers)))
            return
        result = ""
        for number, cell in enumerate(cells, start=1):
            chosen = wrong_cell(cell, rng) if rng.random() < WRONG_CELL else cell
            result = yield call(self._tool_name, code=chosen)
            if number < len(cells) and rng.random() < STOP_AFTER_FIRST_CELL:
                break
        yield say(boxed_answer(rng.choice(numbers) if rng.random() < WRONG_NUMBER else result))


class _Silent(Toolkit):
    """The tool without its output."""

    def __init__(self, python: PythonTool) -> None:
        self._python = python

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return self._python.schemas

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Sequence[Tool]]:
        async with self._python.episode() as (tool,):

            async def run(code: str) -> str:
                with suppress(ToolRejected):
                    await tool.call({"code": code})
                return ""

            yield (Tool.described(tool.schema, run, gate=tool.gate),)


def boxed_answer(text: str) -> str:
    r"""\boxed{text}, as the final answer is written."""
    return f"\\boxed{{{text}}}"


def wrong_cell(cell: str, rng: random.Random) -> str:
    """An easy program with a mistake: a product in place of the power, or the power's numbers exchanged."""
    if rng.random() < 0.5:
        return cell.replace("**", "*", 1)
    return re.sub(r"(\w+)\*\*(\d+)", r"\2**\1", cell, count=1)


def _with_prefix(prompt: tuple[Message, ...], prefix: str) -> tuple[Message, ...]:
    """The prompt with a text before the first message of the user."""
    place = next((n for n, message in enumerate(prompt) if message.role == "user"), None)
    if place is None or not prefix:
        return prompt
    content = prompt[place].content
    begun = f"{prefix}{content}" if isinstance(content, str) else (Text(prefix), *content)
    return (*prompt[:place], Message("user", begun), *prompt[place + 1 :])


def _cells(task: Task) -> Sequence[str]:
    cells = task.metadata.get("cells")
    if not isinstance(cells, list):
        raise UserError("ReTool has an expert for its own problems only; this task comes from other data.")
    return [str(cell) for cell in cells]


@lru_cache(maxsize=32)
def _python_tool(arguments: str) -> PythonTool:
    """One tool for all episodes with the same arguments (JSON): they share its sandbox."""
    return cast(PythonTool, make_tool("python", **json.loads(arguments)))


@lru_cache(maxsize=32)
def _tasks(seed: int, levels: tuple[Level, ...], split: str) -> tuple[Task, ...]:
    tasks = [
        _task(f"{split}-{level}-{number}", problem, level, split)
        for level in levels
        for number, problem in enumerate(problems(seed, level, split))
    ]
    # The first tasks are those of an evaluation: they are of all levels and kinds.
    random.Random(f"order {seed} {split}").shuffle(tasks)
    return tuple(tasks)


def _task(id: str, problem: Problem, level: Level, split: str) -> Task:
    metadata: dict[str, JSON] = {"level": level, "kind": problem.kind, "cells": list(problem.cells)}
    return Task(id, (Message("user", problem.text),), str(problem.answer), metadata, split)
