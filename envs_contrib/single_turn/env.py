"""The environment SingleTurn, whose tasks come from `prompt_data`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from agentrl import Script, SingleTurnEnv, Task, UserError
from agentrl.envs.graders import exact_match, expert_answers

Grade = float | Mapping[str, float]
Reward = Callable[[Task, str], Grade | Awaitable[Grade]]


class SingleTurn(SingleTurnEnv):
    """One answer to a prompt of custom data (`prompt_data`), graded by a grader (`reward`).

    reward: maps a task and an answer to a number, or to named numbers; left out, an exact match with the
        label, or with one of several (`metadata["answers"]`).

    The expert writes what earns full marks by that grader; by `ifeval`, `code`, `remote` and `judge` there is
    none.
    """

    splits = ()

    def __init__(self, reward: Reward | None = None) -> None:
        super().__init__()
        if reward is not None and not callable(reward):
            raise UserError(f"reward is {reward!r}, not a function; the setting `reward` names one.")
        self._reward = reward or exact_match
        self._expert_answers = expert_answers(self._reward)

    def tasks(self, split: str) -> Sequence[Task]:
        """No tasks: they come from `prompt_data`."""
        del split
        return ()

    def grade(self, task: Task, answer: str) -> Grade | Awaitable[Grade]:
        """The value of the reward function."""
        return self._reward(task, answer)

    @property
    def has_expert(self) -> bool:
        """Whether labels make answers of full marks."""
        return self._expert_answers is not None

    def expert(self, task: Task) -> Script:
        """Answers with full marks.

        Raises:
            UserError: no label of the task makes such an answer.
        """
        answer = None if self._expert_answers is None else self._expert_answers(task)
        return super().expert(replace(task, answer=answer))
