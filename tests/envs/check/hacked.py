"""Worlds with one fault each of the checks that RFC 008 asks for, and of hints."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from typing import Literal

from agentrl import Message, Reward, Step, Task, call, say, tool
from agentrl.tools import inline
from tests.envs.check.broken import Good, caught_by

ELSEWHERE = ("192.0.2.1", 9)  # TEST-NET-1 (RFC 5737): nobody answers


def knock(address):
    """Begin to connect, and hang up at once."""
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.connect_ex(address)


@caught_by("above-chance")
class PaysWords(Good):
    """A verifier that trusts a word of its own."""

    def reward(self, task, answer):
        return float(answer == task.answer or "verified by the grader" in answer)


@caught_by("above-chance")
class PaysForm(Good):
    """Accepts whatever looks like an answer."""

    def reward(self, task, answer):
        return float(
            answer in {self.partner(word) for word in ("amber", "basil", "cedar", "dahlia", "ember")}
            or answer == task.answer
        )


@caught_by("above-chance")
class PaysQuotes(Good):
    """Accepts a sentence of the prompt."""

    def reward(self, task, answer):
        return float(answer == task.answer or (answer.endswith("?") and answer in task.prompt[0].content))


@caught_by("above-chance")
class PaysRepetition(Good):
    """Rewards the second of two equal calls."""

    last = None

    async def step(self, action):
        step = await super().step(action)
        before, self.last = self.last, repr(action.tool_calls)
        return step._replace(reward=0.5) if action.tool_calls and before == self.last else step


@caught_by("above-chance")
class Stuck(Good):
    """One call of its tool, three times, wins every task."""

    @tool(inline=True)
    def turn(self, way: Literal["left", "right", "up", "down"]) -> str:
        """Turn."""
        self.turns = [*getattr(self, "turns", ()), way]
        return "turned"

    tools = (turn,)

    def reward(self, task, answer):
        return float(answer == task.answer or getattr(self, "turns", []) == ["up"] * 3)

    async def step(self, action):
        step = await super().step(action)
        if getattr(self, "turns", []) == ["up"] * 3:
            return Step.finished(reward=1.0)
        return step

    def expert(self, task):
        yield say(task.answer)


@caught_by("tool-undeclared")
class Whispers(Good):
    """A tool works that no model is told of."""

    async def step(self, action):
        if [tool_call.name for tool_call in action.tool_calls] == ["peek"]:
            return await super().step(
                Message("assistant", tool_calls=(call("look", word=self.task.metadata["word"]).tool_calls))
            )
        return await super().step(action)

    def expert(self, task):
        yield say((yield call("peek")))


@caught_by("network-undeclared")
class Phones(Good):
    async def reset(self, task, *, seed):
        knock(ELSEWHERE)
        return await super().reset(task, seed=seed)


@caught_by("host-readable")
class ReadsAnything(Good):
    @tool(inline=True)
    def read(self, path: str) -> str:
        """Read a file."""
        file = Path(path)
        return file.read_text() if "\0" not in path and len(path) < 500 and file.is_file() else "no such file"

    tools = (*Good.tools, read)


@caught_by("host-writable")
class WritesAnywhere(Good):
    @tool(inline=True)
    def save(self, path: str) -> str:
        """Make an empty file."""
        if path.startswith("/") and path.endswith("written.txt"):
            Path(path).touch()
        return "saved"

    tools = (*Good.tools, save)


@caught_by("answer-in-tools")
class DescribesAnswers(Good):
    @property
    def tool_schemas(self):
        shown = super().tool_schemas
        if self.task is None:
            return shown
        return tuple(
            one._replace(description=f"{one.description} Such as {self.task.answer}.") for one in shown
        )


@caught_by("answer-in-observation")
class Corrects(Good):
    """Tells what would have been right."""

    async def step(self, action):
        step = await super().step(action)
        if step.terminated or not any(one.name == "no_such_tool" for one in action.tool_calls):
            return step
        return step._replace(observation=(Message("user", f"{'No. ' * 80}Solution: {self.task.answer}"),))


@caught_by("above-chance not-replayable")
class OpensFromInside(Good):
    """The expert reaches into the world."""

    solved = False

    def reward(self, task, answer):
        return float(self.solved or answer == task.answer)

    def expert(self, task):
        self.solved = True
        yield say("")


MARKS = itertools.count()


@inline
def drifting(episode):
    return next(MARKS) * 1e-15


@caught_by("scores-differ")
class Drifts(Good):
    rewards = (Reward(drifting),)


@caught_by("observation-cut")
class CutsOff(Good):
    async def step(self, action):
        step = await super().step(action)
        return (
            step
            if step.terminated
            else step._replace(observation=(*step.observation, Message("user", f"{'so ' * 80}...")))
        )

    def expert(self, task):
        yield say((yield call("look", word=task.metadata["word"])).split("\n")[0])


@caught_by("length-pays")
class PaysByTheWord(Good):
    def reward(self, task, answer):
        return 1.0 if answer == task.answer else min(len(answer), 2000) * 1e-4


@caught_by("length-pays")
class ChargesByTheWord(Good):
    def reward(self, task, answer):
        return 1.0 if answer == task.answer else -min(len(answer), 2000) * 2e-5


@caught_by("splits-nearly-overlap")
class Shouts(Good):
    """The held-out tasks are those of training, in capitals."""

    def tasks(self, split):
        tasks = super().tasks("train")
        if split == "train":
            return tasks
        return [
            Task.ask(f"test-{one.id}", one.prompt[0].content.upper(), one.answer, **one.metadata)
            for one in tasks
        ]


@caught_by("never-full-marks")
class ReadsHalf(Good):
    """The grader reads the answers of half of the data in another form."""

    expert_score = 0.5

    def tasks(self, split):
        return [
            Task.ask(one.id, one.prompt[0].content, one.answer + " (a stone)" * (k % 2), **one.metadata)
            for k, one in enumerate(super().tasks(split))
        ]

    def reward(self, task, answer):
        return float(answer == task.answer.partition(" ")[0])

    def expert(self, task):
        yield say(task.answer)
