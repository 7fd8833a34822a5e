"""The tables of a run: how good the policy was at each of its stages, and the calls of each tool.

Stages are columns, since there are few; scores and tools are lines, of which there may be many.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.types import JSON, ToolStats

Figure = float | int | str


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """The policy at one stage of a run, e.g. "after warm start". None = not measured.

    scores: of all episodes, by name. parts: of some of them, by a heading (`greedy, by hops`) and by what the
    episodes have in common. set: the name of their set of prompts; "" = the only one.
    """

    stage: str
    scores: Mapping[str, float | None]
    parts: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    set: str = ""


class ScoreLine(NamedTuple):
    """A line of the table: one score at each stage. values: none for a heading. level: headings above it."""

    name: str
    values: tuple[float | None, ...] = ()
    level: int = 0


class ToolRow(NamedTuple):
    """The calls of one tool at one stage of a run. episodes: those that were played there (count)."""

    tool: str
    stage: str
    episodes: int
    stats: ToolStats


class ToolTable(NamedTuple):
    """The table of tools. tools: by tool and stage, the cell of each column: its text, and a note on it."""

    columns: tuple[str, ...]
    tools: Mapping[str, Mapping[str, Sequence[tuple[str, str]]]]


def stages_of(rows: Sequence[ScoreRow]) -> tuple[str, ...]:
    """The stages of a run, which are the columns of its table: there are few, of scores there may be many."""
    return tuple(dict.fromkeys(row.stage for row in rows))


def lines_of(rows: Sequence[ScoreRow]) -> Iterator[ScoreLine]:
    """The lines of the table: the scores of each set of prompts, then their parts, each below its heading."""
    stages = stages_of(rows)
    for name in dict.fromkeys(row.set for row in rows):
        of_set = {row.stage: row for row in rows if row.set == name}
        level = 1 if name else 0
        if name:
            yield ScoreLine(name)
        yield from _lines(stages, {stage: row.scores for stage, row in of_set.items()}, level)
        for heading in dict.fromkeys(heading for row in of_set.values() for heading in row.parts):
            yield ScoreLine(heading, level=level)
            by_stage = {stage: row.parts.get(heading, {}) for stage, row in of_set.items()}
            yield from _lines(stages, by_stage, level + 1)


def _lines(
    stages: Sequence[str], by_stage: Mapping[str, Mapping[str, float | None]], level: int
) -> Iterator[ScoreLine]:
    for name in dict.fromkeys(name for scores in by_stage.values() for name in scores):
        yield ScoreLine(name, tuple(by_stage.get(stage, {}).get(name) for stage in stages), level)


def tool_table(rows: Sequence[ToolRow]) -> ToolTable:
    """The calls of each tool at each stage. Rare events have a column only where there was one.

    Rejected and failed calls are listed by their kinds, as in `ToolStats`.
    """
    cells = [_tool_cells(row) for row in rows]
    columns = tuple(
        name
        for name in (cells[0] if cells else ())
        if name in _TOOL_COLUMNS or any(of_row[name][0] != "0" for of_row in cells)
    )
    tools: dict[str, dict[str, Sequence[tuple[str, str]]]] = {}
    for row, of_row in zip(rows, cells, strict=True):
        tools.setdefault(row.tool, {})[row.stage] = [of_row[name] for name in columns]
    return ToolTable(columns, tools)


_TOOL_COLUMNS = ("calls per episode", "calls", "rejected", "ms per call")


def _tool_cells(row: ToolRow) -> dict[str, tuple[str, str]]:
    stats = row.stats
    calls = max(stats.calls, 1)
    waited = 1e3 * stats.queue_seconds / calls
    return {
        "calls per episode": (figure_text(stats.calls / max(row.episodes, 1)), ""),
        "calls": (figure_text(stats.calls), ""),
        "malformed": _counted({"": stats.malformed}, calls),
        "rejected": _counted(stats.rejected, calls),
        "corrected": _counted({"": stats.coerced}, calls),
        "timed out": _counted({"": stats.timeouts}, calls),
        "cut": _counted({"": stats.truncated}, calls),
        "failed": _counted(stats.failed, calls),
        "ms per call": ("–" if stats.latency_ms is None else figure_text(stats.latency_ms), ""),
        "ms waited": ("0" if waited < 0.0005 else figure_text(waited), ""),
    }


def _counted(kinds: Mapping[str, int], calls: int) -> tuple[str, str]:
    """A number of calls with its share of all, and the kinds, the most frequent first."""
    number = sum(kinds.values())
    frequent = sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0]))
    names = ", ".join(f"{name}\N{NO-BREAK SPACE}{count:,}" for name, count in frequent if name)
    return (f"{number:,} ({number / calls:.1%})" if number else "0", names)


def setting_text(value: JSON) -> str:
    """The value of a setting: a string as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def score_text(value: float | None) -> str:
    """Three decimals, or a dash where nothing was measured."""
    return "–" if value is None else f"{value:z.3f}"


def figure_text(value: Figure) -> str:
    """A number in readable form: 12,345 or 0.512 or 3.2e-05; text unchanged."""
    if isinstance(value, str):
        return value
    size = abs(value)
    if isinstance(value, int) or size >= 1000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:z.3f}" if size >= 0.001 or size == 0 else f"{value:.1e}"


def size_text(num_bytes: int) -> str:
    """A number of bytes: 812 B, 3.4 kB, 1.6 GB; k is 1,000."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"


def time_text(seconds: float) -> str:
    """A span of time: 4 s, 1 min 05 s, 2 h 03 min."""
    rounded = round(max(seconds, 0.0))
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
