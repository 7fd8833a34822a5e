"""The environments SingleTurn and Tools, whose tasks come from `prompt_data`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import cache

from agentrl import Env, Message, Script, SingleTurnEnv, Task, ToolEnv, UserError, say
from agentrl.envs.graders import exact_match, expert_answers, make_grader

Grade = float | Mapping[str, float]
Reward = Callable[[Task, str], Grade | Awaitable[Grade]]


class _OfPrompts(Env):
    """Prompts of custom data, whose answers are graded by a function, or by a grader of the package."""

    splits = ()

    def __init__(self, reward: Reward | str | None = None) -> None:
        super().__init__()
        if isinstance(reward, str):
            reward = _named(reward)
        if reward is not None and not callable(reward):
            raise UserError(f"reward is {reward!r}; pass a function, or the name of a grader, such as 'f1'.")
        self._grade = reward or exact_match
        self._expert_answers = expert_answers(self._grade)

    def tasks(self, split: str) -> Sequence[Task]:
        """No tasks: they come from `prompt_data`."""
        del split
        return ()

    @property
    def has_expert(self) -> bool:
        """Whether labels make answers of full marks."""
        return self._expert_answers is not None

    def expert(self, task: Task) -> Script:
        """Answers with full marks, without a tool.

        Raises:
            UserError: no label of the task makes such an answer.
        """
        answer = None if self._expert_answers is None else self._expert_answers(task)
        return Env.expert(self, task) if answer is None else _once(answer)


class SingleTurn(_OfPrompts, SingleTurnEnv):
    """One answer to a prompt of custom data (`prompt_data`), graded by a grader (`reward`).

    reward: maps a task and an answer to a number, or to named numbers; or the name of a grader; left out, an
        exact match with the label, or with one of several (`metadata["answers"]`).

    The expert writes what earns full marks by that grader; by `ifeval`, `code`, `remote` and `judge` there is
    none.
    """

    def grade(self, task: Task, answer: str) -> Grade | Awaitable[Grade]:
        """The value of the reward function."""
        return self._grade(task, answer)


class Tools(_OfPrompts, ToolEnv):
    """Prompts of custom data (`prompt_data`), tools by name (`tools`), and a grader of the answer (`reward`).

    reward: as for `SingleTurn`, of the answer after the last call.
    """

    def reward(self, task: Task, answer: str) -> Grade | Awaitable[Grade]:
        """The value of the reward function."""
        return self._grade(task, answer)


@cache
def _named(name: str) -> Reward:
    """The grader of a name; all episodes share it, with its processes and connections."""
    return make_grader(name)


def _once(answer: str) -> Generator[Message, str, None]:
    yield say(answer)
