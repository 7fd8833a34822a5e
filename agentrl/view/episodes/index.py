"""The index of the page: a column for each field of the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agentrl.records.lines import to_line
from agentrl.types import JSON
from agentrl.view.episodes.line import EpisodeRow
from agentrl.view.episodes.shards import write_script
from agentrl.view.scores import figure_text

_ROWS: Final = 20_000
_CODED: Final = ("env", "ending", "outcome", "tools")
_MAX_VALUES: Final = 1000
_OTHER: Final = "other"
_MAX_FACTS: Final = 16
_MAX_WORDS: Final = 50
"""Of a fact that can be chosen: one with more values, such as a name of each task, is no filter."""


@dataclass(slots=True)
class Codes:
    """Numbers for values of which there are few; beyond 1,000 of them, the rest are `other`."""

    values: dict[str, int] = field(default_factory=dict)

    def of(self, value: str) -> int:
        """The number of a value, a new one where it has none."""
        if value not in self.values and len(self.values) >= _MAX_VALUES:
            value = _OTHER
        return self.values.setdefault(value, len(self.values))


@dataclass(slots=True)
class TaskFacts:
    """Numbers for the values of short metadata, by key, and those of the rows that are not written yet."""

    words: dict[str, dict[str, int]] = field(default_factory=dict)
    _left_out: set[str] = field(default_factory=set)
    _rows: list[dict[str, int]] = field(default_factory=list)

    def add(self, facts: Mapping[str, str]) -> None:
        """Add the facts of the next row."""
        row: dict[str, int] = {}
        for key, word in facts.items():
            if key in self._left_out or (key not in self.words and len(self.words) >= _MAX_FACTS):
                continue
            words = self.words.setdefault(key, {})
            row[key] = words.setdefault(word, len(words))
            if len(words) > _MAX_WORDS:
                del self.words[key]
                self._left_out.add(key)
        self._rows.append(row)

    def take_columns(self) -> dict[str, JSON]:
        """The numbers of the rows since the last call, by key; -1 = a row has no such fact."""
        rows, self._rows = self._rows, []
        return {key: [row.get(key, -1) for row in rows] for key in self.words}

    def choices(self) -> dict[str, JSON]:
        """The values of each key that has several, by their numbers."""
        return {key: list(words) for key, words in self.words.items() if len(words) > 1}


@dataclass(slots=True)
class FileSummary:
    """The rows of one journal file. first: the number of its first row. total: of the rewards."""

    first: int
    num_rows: int = 0
    num_scored: int = 0
    total: float = 0.0

    def add(self, row: EpisodeRow) -> None:
        """Count a row."""
        self.num_rows += 1
        if row.reward is not None:
            self.num_scored += 1
            self.total += row.reward

    @property
    def mean(self) -> float | None:
        """The mean reward of the scored episodes."""
        return self.total / self.num_scored if self.num_scored else None

    def text(self) -> str:
        """One line for people."""
        reward = "" if self.mean is None else f", mean reward {figure_text(self.mean)}"
        return f"{self.num_rows:,} episodes{reward}"


@dataclass(slots=True)
class Index:
    """Writes rows in columns, 20,000 at a time. Tasks are numbered in each part, other values in all."""

    folder: Path
    files: list[FileSummary] = field(default_factory=list)
    num_rows: int = 0
    starts: list[int] = field(default_factory=list)
    _codes: dict[str, Codes] = field(default_factory=lambda: {name: Codes() for name in _CODED})
    facts: TaskFacts = field(default_factory=TaskFacts)
    _tasks: dict[tuple[str, str], int] = field(default_factory=dict)
    _groups: dict[str, int] = field(default_factory=dict)
    _num_groups: int = 0
    _columns: defaultdict[str, list[JSON]] = field(default_factory=lambda: defaultdict(list))

    def begin_file(self) -> None:
        """Begin the rows of the next journal file, whose groups are its own."""
        self.files.append(FileSummary(self.num_rows))
        self._groups = {}

    def add(self, row: EpisodeRow) -> None:
        """Add the next row."""
        self.files[-1].add(row)
        if row.group not in self._groups:
            self._groups[row.group] = self._num_groups
            self._num_groups += 1
        self.facts.add(row.facts)
        cells: dict[str, JSON] = row._asdict()
        del cells["facts"], cells["prompt"]
        cells["task"] = self._tasks.setdefault((row.task, row.prompt), len(self._tasks))
        cells["group"] = self._groups[row.group]
        cells["file"] = len(self.files) - 1
        cells["tools"] = "\n".join(row.tools)
        for name, codes in self._codes.items():
            cells[name] = codes.of(str(cells[name]))
        for name, cell in cells.items():
            self._columns[name].append(cell)
        self.num_rows += 1
        if len(self._columns["id"]) >= _ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that are in no part yet."""
        if not self._columns:
            return
        first = self.num_rows - len(self._columns["id"])
        part = {
            "first": first,
            "tasks": [task for task, _ in self._tasks],
            "prompts": [prompt for _, prompt in self._tasks],
            "facts": self.facts.take_columns(),
            "columns": self._columns,
        }
        write_script(self.folder, "index", len(self.starts), to_line(part))
        self.starts.append(first)
        self._columns, self._tasks = defaultdict(list), {}

    def coded(self) -> Mapping[str, Sequence[JSON]]:
        """The values of each column of codes, by their numbers."""
        return {name: list(codes.values) for name, codes in self._codes.items()}
