"""A report on a file of prompts: counts, lengths, invalid rows, and some rendered prompts."""

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

_NUM_RENDERED = 3
_MAX_PROBLEMS = 20
_MAX_PROBLEM_CHARS = 1_000
_MAX_RENDERED_CHARS = 10_000


class RowProgress(Protocol):
    """A progress bar over row numbers: yields them unchanged."""

    def __call__(self, numbers: Iterable[int], total: int) -> Iterable[int]:
        """The same numbers. total: their count."""


def no_progress(numbers: Iterable[int], total: int) -> Iterable[int]:
    """Yields the numbers without a progress bar."""
    del total
    return numbers


@dataclass(frozen=True, slots=True)
class DataReport:
    """Statistics of the rows of a file or a folder.

    prompts: rows that are valid prompts (count). bad: rows that are not (count). problems: error messages of
    the first of these. unit: of lengths, tokens or characters. lengths: minimum, median, 95th and 99th
    percentile, maximum, mean. turns: prompts by their number of messages. labels, tools: prompts that have
    an answer, tools (count). rendered: some prompts as text. unfit: rows of a sample that a grader cannot
    grade, and why; or that no row has a label. Of long texts and messages, the middle is left out.
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
    unfit: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every row is a valid prompt, and the grader fits those of the sample."""
        return self.bad == 0 and not self.unfit

    def as_json(self) -> dict[str, JSON]:
        """The fields as JSON values, in their order."""
        turns: dict[str, JSON] = {str(count): number for count, number in self.turns.items()}
        return {"ok": self.ok, **asdict(self), "turns": turns}


@dataclass(frozen=True, slots=True)
class Measure:
    """Functions that measure and render prompts. unit: of `length`."""

    unit: str
    length: Callable[[Task], int]
    render: Callable[[Task], str]


def as_text(task: Task) -> str:
    """The prompt as text, one `role: text` line for each message."""
    return "\n".join(f"{message.role}: {message.text}" for message in task.prompt)


CHARACTERS = Measure("characters", lambda task: sum(len(message.text) for message in task.prompt), as_text)
"""The measure without a tokenizer."""


def report_on(
    path: str,
    columns: Columns,
    *,
    split: str = "train",
    measure: Measure = CHARACTERS,
    progress: RowProgress = no_progress,
) -> DataReport:
    """Read all rows of `path`.

    Raises:
        DataError: the file cannot be opened.
    """
    source = FileSource(path, columns, shuffle=False, split=split, is_checked=False)
    total = source.num_tasks
    rendered_rows = {total * k // _NUM_RENDERED for k in range(_NUM_RENDERED)}
    lengths, problems, rendered = array("q"), [], []
    turns: Counter[int] = Counter()
    labels = tools = bad = 0
    for number in progress(range(total), total):
        try:
            task = source.task_of_row(number)
        except DataError as error:
            bad += 1
            problems += [_cut(str(error), _MAX_PROBLEM_CHARS)] if bad <= _MAX_PROBLEMS else []
            continue
        lengths.append(measure.length(task))
        turns[len(task.prompt)] += 1
        labels += task.answer is not None
        tools += bool(task.metadata.get("tools"))
        if number in rendered_rows:
            rendered.append(_cut(measure.render(task), _MAX_RENDERED_CHARS))
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
        unfit=(without_answers(columns.label),) if columns.label and lengths and not labels else (),
    )


def without_answers(label_key: str) -> str:
    """What is said where no row has a label."""
    return f"no row has an answer in `{label_key}`; name another column with label_key, or leave it out."


def _cut(text: str, max_chars: int) -> str:
    """The text, whose middle is left out where it is longer: a terminal shows a long one for minutes."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out ...]\n{text[-half:]}"


def _summary(lengths: array[int]) -> dict[str, float]:
    if not lengths:
        return {}
    samples = np.asarray(lengths)
    quantiles = {"min": 0.0, "median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    values = np.quantile(samples, [*quantiles.values()], method="nearest")
    return {**dict(zip(quantiles, values.tolist(), strict=True)), "mean": float(samples.mean())}
