"""A filter over a source, which skips prompts that are too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from agentrl.data.source import TOO_LONG, DataSource, Prompt, Skipped
from agentrl.types import JSON, Group, Task


class Bounded(DataSource):
    """The prompts of a source; a prompt with more than `most` tokens is skipped.

    length: returns the tokens of a task's prompt (count).
    """

    def __init__(self, source: DataSource, *, most: int, length: Callable[[Task], int]) -> None:
        super().__init__(seed=source.seed)
        self._source = source
        self._most = most
        self._length = length

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the source: the filter leaves the numbers of prompts unchanged."""
        return self._source.fingerprint

    @property
    def num_tasks(self) -> int | None:
        """Tasks of an epoch of the source."""
        return self._source.num_tasks

    def task(self, ordinal: int) -> Task | Skipped:
        """The task of a number, or `Skipped` where its prompt is too long."""
        task = self._source.task(ordinal)
        return task if isinstance(task, Skipped) else self._skipped(task, ordinal) or task

    def prompt(self, ordinal: int) -> Prompt | Skipped:
        """The prompt of a number, or `Skipped` where it is too long."""
        prompt = self._source.prompt(ordinal)
        return prompt if isinstance(prompt, Skipped) else self._skipped(prompt.task, ordinal) or prompt

    def add_groups(self, groups: Sequence[Group]) -> None:
        """The source hears of them."""
        self._source.add_groups(groups)

    def state(self, pending: Iterable[int]) -> JSON:
        """That of the source."""
        return self._source.state(pending)

    def restore(self, state: JSON) -> None:
        """Restore the source."""
        self._source.restore(state)

    def preview(self) -> DataSource:
        """The same over a preview of the source."""
        return Bounded(self._source.preview(), most=self._most, length=self._length)

    def _skipped(self, task: Task, ordinal: int) -> Skipped | None:
        length = self._length(task)
        if length <= self._most:
            return None
        return Skipped(ordinal, TOO_LONG, f"task {task.id} has {length:,} tokens, {self._most:,} are allowed")
