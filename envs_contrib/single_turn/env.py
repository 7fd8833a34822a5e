"""The environment SingleTurn, whose tasks come from `prompt_data`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from agentrl import SingleTurnEnv, Task, UserError
from agentrl.graders import exact_match

Grade = float | Mapping[str, float]
Reward = Callable[[Task, str], Grade | Awaitable[Grade]]


class SingleTurn(SingleTurnEnv):
    """One answer to a prompt of custom data (`prompt_data`), graded by a grader (`reward`).

    reward: maps a task and an answer to a number, or to named numbers; left out, an exact match with the
        label, or with one of several (`metadata["answers"]`).
    """

    splits = ()

    def __init__(self, reward: Reward | None = None) -> None:
        super().__init__()
        if reward is not None and not callable(reward):
            raise UserError(f"reward is {reward!r}, not a function; the setting `reward` names one.")
        self._reward = reward or exact_match

    def tasks(self, split: str) -> Sequence[Task]:
        """No tasks: they come from `prompt_data`."""
        del split
        return ()

    def grade(self, task: Task, answer: str) -> Grade | Awaitable[Grade]:
        """The value of the reward function."""
        return self._reward(task, answer)
