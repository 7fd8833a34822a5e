"""What a file of prompts holds: every row read, lengths, what is wrong, some prompts to look at."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np

from agentrl.data.columns import Columns
from agentrl.data.files import FileSource
from agentrl.errors import DataError
from agentrl.types import JSON, Task

_SHOWN = 3
_MAX_PROBLEMS = 20


class Watch(Protocol):
    """Shows how far a loop over numbers is: yields them as they are."""

    def __call__(self, numbers: Iterable[int], total: int) -> Iterable[int]:
        """The same numbers."""


def unwatched(numbers: Iterable[int], total: int) -> Iterable[int]:
    """Shows nothing."""
    del total
    return numbers


@dataclass(frozen=True, slots=True)
class DataReport:
    """What was found in the rows of a file or a folder.

    prompts: rows that are prompts. bad: rows that are not. problems: sentences about the first of these.
    unit: of lengths, tokens or characters. lengths: least, median, 95th and 99th percentile, most, mean.
    turns: how many prompts have so many messages. labels: prompts that have an answer. rendered: some of
    them.
    """

    path: str
    fingerprint: str
    prompts: int
    bad: int
    problems: tuple[str, ...]
    labels: int
    tools: int
    turns: dict[int, int]
    unit: str
    lengths: dict[str, float] = field(default_factory=dict)
    rendered: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every row is a prompt."""
        return self.bad == 0

    def as_json(self) -> dict[str, JSON]:
        """Plain values, in the order of the fields."""
        turns: dict[str, JSON] = {str(count): number for count, number in self.turns.items()}
        return {"ok": self.ok, **asdict(self), "turns": turns}


@dataclass(frozen=True, slots=True)
class Measure:
    """How prompts are shown and measured. unit: what `length` counts."""

    unit: str
    length: Callable[[Task], int]
    render: Callable[[Task], str]


def as_words(task: Task) -> str:
    """A prompt as its roles and words."""
    return "\n".join(f"{message.role}: {message.text}" for message in task.prompt)


CHARACTERS = Measure("characters", lambda task: sum(len(one.text) for one in task.prompt), as_words)
"""Without a tokenizer."""


def report_on(
    path: str,
    columns: Columns,
    *,
    split: str = "train",
    measure: Measure = CHARACTERS,
    watch: Watch = unwatched,
) -> DataReport:
    """Read all rows of `path`.

    Raises:
        DataError: it cannot be read at all.
    """
    source = FileSource(path, columns, shuffle=False, split=split, is_checked=False)
    total = source.num_tasks
    shown = {total * k // _SHOWN for k in range(_SHOWN)}
    lengths, problems, rendered = array("q"), [], []
    turns: Counter[int] = Counter()
    labels = tools = bad = 0
    for number in watch(range(total), total):
        try:
            task = source.task_of_row(number)
        except DataError as error:
            bad += 1
            problems += [str(error)] if bad <= _MAX_PROBLEMS else []
            continue
        lengths.append(measure.length(task))
        turns[len(task.prompt)] += 1
        labels += task.answer is not None
        tools += bool(task.metadata.get("tools"))
        if number in shown:
            rendered.append(measure.render(task))
    return DataReport(
        path=path,
        fingerprint=source.fingerprint,
        prompts=len(lengths),
        bad=bad,
        problems=tuple(problems),
        labels=labels,
        tools=tools,
        turns=dict(sorted(turns.items())),
        unit=measure.unit,
        lengths=_summary(lengths),
        rendered=tuple(rendered),
    )


def _summary(lengths: array[int]) -> dict[str, float]:
    if not lengths:
        return {}
    found = np.asarray(lengths)
    shares = {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    values = np.quantile(found, [*shares.values()], method="nearest")
    return {**dict(zip(shares, values.tolist(), strict=True)), "mean": float(found.mean())}
