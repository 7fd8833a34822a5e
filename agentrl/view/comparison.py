"""Runs next to each other: settings that differ, held-out scores, last metrics, time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from agentrl.records import Record, read_metrics
from agentrl.records.history import METRICS
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import read_file
from agentrl.types import JSON
from agentrl.view.chart import draw, legend
from agentrl.view.panels import Panel, overlaid
from agentrl.view.report import render_page
from agentrl.view.scores import figure_text, score_text, setting_text, time_text
from agentrl.view.transcript import visible

T = TypeVar("T")

_NONE, _GAP = "–", 2
_MAX_CELL = 28
"""Characters of a cell in a terminal; a longer one is cut. The page and the JSON have all of it."""


class Score(BaseModel):
    """The mean score of an evaluation, and its 95% interval."""

    mean: float
    low: float
    high: float


class _Milestone(BaseModel):
    """An evaluation of summary.json; its extra keys are modes."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Score] = Field(init=False)
    name: str
    step: int


class _Stage(BaseModel):
    cpu_s: float


class _Summary(BaseModel):
    """The part of summary.json that is compared. `agentrl sft` writes no milestones."""

    milestones: tuple[_Milestone, ...] = ()
    stages: tuple[_Stage, ...]

    def scores(self) -> dict[str, Score]:
        """Of the milestones before and after RL, by `milestone, mode`."""
        last = max((milestone.step for milestone in self.milestones), default=0)
        return {
            f"{milestone.name}, {mode}": score
            for milestone in self.milestones
            if milestone.step in (0, last)
            for mode, score in milestone.__pydantic_extra__.items()
        }


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run as its folder records it.

    settings: by `section.key`, defaults included. records: of metrics.jsonl. scores: of held-out episodes, by
    milestone and mode; empty until the run has ended. cpu_s: CPU time of all its stages (seconds), likewise.
    """

    settings: Mapping[str, JSON]
    records: Sequence[Record]
    scores: Mapping[str, Score]
    cpu_s: float | None = None

    @classmethod
    def read(cls, folder: Path, settings: Mapping[str, JSON]) -> ComparedRun:
        """The run in a folder.

        Raises:
            OSError, ValueError: metrics.jsonl or summary.json cannot be read.
        """
        records = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
        path = folder / "summary.json"
        if not path.exists():
            return cls(settings, records, {})
        summary = _Summary.model_validate_json(read_file(path))
        return cls(settings, records, summary.scores(), sum(stage.cpu_s for stage in summary.stages))

    @property
    def last_metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return {name: value for row in self.records for name, value in row.items() if value is not None}

    @property
    def wall_s(self) -> float | None:
        """Time at the last metrics, over all attempts (seconds)."""
        return self.last_metrics.get("time_s")


class Table(NamedTuple):
    """Lines of a name and a cell for each run."""

    title: str
    lines: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs by name. defaults: of the settings, by `section.key`."""

    runs: Mapping[str, ComparedRun]
    defaults: Mapping[str, JSON]

    def as_json(self) -> dict[str, JSON]:
        """All values by property, then by run; null where a run has none."""
        scores = self._by_run(lambda run: {name: score.model_dump() for name, score in run.scores.items()})
        metrics = self._by_run(lambda run: run.last_metrics)
        return {
            "runs": [*self.runs],
            "settings": {name: {**values} for name, values in self._settings().items()},
            "scores": {name: {**values} for name, values in scores.items()},
            "metrics": {name: {**values} for name, values in metrics.items()},
            "wall_s": {name: run.wall_s for name, run in self.runs.items()},
            "cpu_s": {name: run.cpu_s for name, run in self.runs.items()},
        }

    def tables(self) -> list[Table]:
        """The tables of the text and of the page, without those that have no lines."""
        settings = [
            (name, [_setting_text(value, self.defaults.get(name)) for value in values.values()])
            for name, values in self._settings().items()
        ]
        scores = [
            (name, [_score_text(score) for score in values.values()])
            for name, values in self._by_run(lambda run: run.scores).items()
        ]
        metrics = [(panel.title, self._last_values(panel)) for panel in self._panels()]
        times = [
            ("wall", [_time_text(run.wall_s) for run in self.runs.values()]),
            ("CPU", [_time_text(run.cpu_s) for run in self.runs.values()]),
        ]
        tables = (
            Table("Settings that differ", settings),
            Table("Held-out episodes (mean, 95% interval)", scores),
            Table("Last metrics", metrics),
            Table("Time", times),
        )
        return [table for table in tables if table.lines]

    def text(self, width: int = 100) -> str:
        """The tables for a terminal of so many columns: the runs that fit next to each other, then others."""
        tables, names = self.tables(), [*self.runs]
        first = max(len(name) for table in tables for name, _ in table.lines)
        widths = [
            min(
                _MAX_CELL, max(len(run), *(len(cells[index]) for table in tables for _, cells in table.lines))
            )
            for index, run in enumerate(names)
        ]
        blocks: list[str] = []
        for some in _fitting(widths, width - first):
            own = [first, *(widths[index] for index in some)]
            blocks += ["", _aligned(["", *(names[index] for index in some)], own)]
            for table in tables:
                lines = [[name, *(cells[index] for index in some)] for name, cells in table.lines]
                blocks += ["", table.title, *(_aligned(line, own) for line in lines)]
        return "\n".join(blocks[1:])

    def write_page(self, path: Path) -> Path:
        """Write a page with the tables, and the curves of all runs in one picture for each metric.

        Raises:
            OSError: the file cannot be written.
        """
        page = render_page(
            "comparison.html",
            runs=list(self.runs),
            tables=self.tables(),
            panels=[(panel, draw(panel), legend(panel)) for panel in self._panels()],
        )
        write_text(path, page, errors="replace")
        return path

    def _panels(self) -> Sequence[Panel]:
        return overlaid({name: run.records for name, run in self.runs.items()})

    def _last_values(self, panel: Panel) -> list[str]:
        last = {
            series.label: next(value for _, value in reversed(series.points) if value is not None)
            for series in panel.series
        }
        return [figure_text(last[name]) if name in last else _NONE for name in self.runs]

    def _settings(self) -> dict[str, dict[str, JSON]]:
        """The settings that differ."""
        by_name = self._by_run(lambda run: run.settings)
        return {
            name: values
            for name, values in by_name.items()
            if any(value != next(iter(values.values())) for value in values.values())
        }

    def _by_run(self, values_of: Callable[[ComparedRun], Mapping[str, T]]) -> dict[str, dict[str, T | None]]:
        """Values by name, then by run, in the order of first mention."""
        values = {name: values_of(run) for name, run in self.runs.items()}
        names = dict.fromkeys(name for of_run in values.values() for name in of_run)
        return {name: {run: of_run.get(name) for run, of_run in values.items()} for name in names}


def _setting_text(value: JSON, default: JSON) -> str:
    text = _NONE if value is None else setting_text(value)
    return f"{text} (default)" if value == default else text


def _score_text(score: Score | None) -> str:
    if score is None:
        return _NONE
    return f"{score_text(score.mean)} ({score_text(score.low)} to {score_text(score.high)})"


def _time_text(seconds: float | None) -> str:
    return _NONE if seconds is None else time_text(seconds)


def _fitting(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """The numbers of columns, those together that fit into so many characters; at least one."""
    some: list[int] = []
    for index, width in enumerate(widths):
        if some and sum(widths[other] + _GAP for other in some) + width + 2 * _GAP > room:
            yield some
            some = []
        some.append(index)
    yield some


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = [
        cell if len(cell) <= width else f"{cell[: width - 1]}…"
        for cell, width in zip(map(visible, cells), widths, strict=True)
    ]
    name, *values = (f"{cell:<{width}}" for cell, width in zip(shown, widths, strict=True))
    return (" " * _GAP).join([f"{'':<{_GAP}}{name}", *values]).rstrip()
