"""Environments of one question, one answer, one grade."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Generator, Mapping, Sequence

from agentrl.envs.base import Env, Script
from agentrl.envs.scoring import Grade, graded
from agentrl.errors import StageError
from agentrl.tools.running import inline
from agentrl.types import JSON, Limits, Message, Observation, Step, Task, say
from agentrl.types.seams import ToolSchema


class SingleTurnEnv(Env):
    """A question whose answer is graded: the complete text of the model is the answer.

        class Sums(SingleTurnEnv):
            def tasks(self, split):
                return [Task.ask(f"{n}", f"What is {n} + {n}?", answer=f"{2 * n}") for n in range(100)]

            def grade(self, task, answer):
                return float(answer.strip() == task.answer)

    The expert answers with `task.answer`; override `expert` where that is not the full answer. Tools in a
    task's metadata (`tool_key`) are listed for the model and never run: a call is the answer.
    """

    group = "text"
    limits = Limits(max_turns=1)
    task: Task | None = None

    @abstractmethod
    def grade(self, task: Task, answer: str) -> Grade | Awaitable[Grade]:
        """The reward of an answer, sync or async: a finite number, or named numbers to be summed.

        A synchronous one runs in a thread of its own, so that its deadline can end the wait; where it takes
        microseconds, mark it `agentrl.tools.inline`.
        """

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The tools in the metadata of the task."""
        return () if self.task is None else schemas_in(self.task)

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """Return the question."""
        self.seed_rng(seed)
        self.task = task
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """Grade the answer, whatever its form.

        Raises:
            StageError: the grade function failed, which counts as a failure of the world.
        """
        if self.task is None:
            raise StageError("step", "invalid", "step() came before reset()")
        # Text that a dialect parsed as a call belongs to the answer, too: this environment has no tools.
        answer = "".join([action.text, *(call.raw for call in action.tool_calls)])
        return Step.finished(reward=await graded(self.grade, self.task, answer, self.limits.reward_timeout_s))

    @inline
    def save_state(self) -> Mapping[str, JSON] | None:
        """Nothing changes before the only step; None where a subclass has steps of its own."""
        return {} if type(self).step is SingleTurnEnv.step else None

    def expert(self, task: Task) -> Script:
        """Answers with `task.answer`.

        Raises:
            UserError: the task has no answer.
        """
        return super().expert(task) if task.answer is None else _once(task.answer)


def _once(answer: str) -> Generator[Message, str, None]:
    yield say(answer)


def schemas_in(task: Task) -> tuple[ToolSchema, ...]:
    """The tools in the metadata of a task."""
    tools = task.metadata.get("tools")
    return tuple(_schema(tool) for tool in tools if isinstance(tool, dict)) if isinstance(tools, list) else ()


def _schema(tool: Mapping[str, JSON]) -> ToolSchema:
    parameters = tool.get("parameters")
    described = parameters if isinstance(parameters, dict) else {}
    return ToolSchema(str(tool.get("name", "")), str(tool.get("description", "")), described)
