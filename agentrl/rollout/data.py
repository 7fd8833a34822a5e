"""The order in which tasks are played."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.types import Task


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task, the seed of the world for its whole group, and its index in the stream."""

    index: int
    task: Task
    seed: int


class TaskStream:
    """An endless stream of tasks: every epoch contains each task once, in an order of its own.

    The order depends on the run's seed alone.

    Raises:
        ConfigError: there are no tasks.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool = True) -> None:
        if not tasks:
            raise ConfigError("the split holds no tasks; name a split that the environment fills.")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._order: list[int] = []
        self._index = 0

    def next(self) -> Prompt:
        """The next task of the stream."""
        epoch, position = divmod(self._index, len(self._tasks))
        if position == 0:
            self._order = list(range(len(self._tasks)))
            if self._shuffle:
                random.Random(f"order/{self._seed}/{epoch}").shuffle(self._order)
        world = random.Random(f"world/{self._seed}/{self._index}").getrandbits(31)
        prompt = Prompt(self._index, self._tasks[self._order[position]], world)
        self._index += 1
        return prompt
