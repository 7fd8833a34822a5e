"""A source without the prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.data.source import TOO_LONG, DataSource, Prompt, Skipped
from agentrl.types import Task


class Bounded(DataSource):
    """The prompts of a source; one of more than `most` tokens is skipped.

    length: tokens of a task's prompt.
    """

    def __init__(self, source: DataSource, *, most: int, length: Callable[[Task], int]) -> None:
        super().__init__(seed=source.seed)
        self._source = source
        self._most = most
        self._length = length

    @property
    def fingerprint(self) -> str:
        """The source's: the numbers of prompts stay what they are."""
        return self._source.fingerprint

    @property
    def num_tasks(self) -> int | None:
        """The source's."""
        return self._source.num_tasks

    def task(self, ordinal: int) -> Task | Skipped:
        """The task of a number, where it is short enough."""
        found = self._source.task(ordinal)
        return found if isinstance(found, Skipped) else self._skipped(found, ordinal) or found

    def prompt(self, ordinal: int) -> Prompt | Skipped:
        """The prompt of a number, where it is short enough."""
        found = self._source.prompt(ordinal)
        return found if isinstance(found, Skipped) else self._skipped(found.task, ordinal) or found

    def _skipped(self, task: Task, ordinal: int) -> Skipped | None:
        length = self._length(task)
        if length <= self._most:
            return None
        return Skipped(ordinal, TOO_LONG, f"task {task.id} has {length:,} tokens, {self._most:,} are allowed")
