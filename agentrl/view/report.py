"""A run as one HTML page: a table, curves, episodes token by token; without scripts or external files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentrl.records import Record
from agentrl.records.diagnoses import Diagnosis
from agentrl.records.timeline import Timeline
from agentrl.runtime.activity import KINDS
from agentrl.runtime.files import write_text
from agentrl.types import JSON, Author, Episode, Verdict
from agentrl.view.chart import Histogram, draw, draw_histogram, histogram_legend, legend, ticks
from agentrl.view.panels import Panel, Series, panels_of
from agentrl.view.scores import (
    ScoreRow,
    ToolRow,
    lines_of,
    score_text,
    setting_text,
    stages_of,
    time_text,
    tool_table,
)
from agentrl.view.tokens import NAMES, blocks_of, token_rows
from agentrl.view.transcript import summary_of, visible

# When each side of a run worked, as SVG: a row for each kind of work, darker the more of the time it did.
#
# The last iterations also have a row for each process besides the run's own.
COLUMNS = 480
NUM_LAST = 4
"""The iterations of the second picture."""
_LEFT, _WIDTH, _RIGHT, _ROW, _BAR, _AXIS = 80, 2 * COLUMNS, 50, 20, 14, 26
_LEVELS = 8
_MAX_PROCESSES, _MAX_NAME = 32, 12
"""Rows of processes, of a large run the first (count), and their names (characters)."""


def pictures(timeline: Timeline) -> list[tuple[str, Markup]]:
    """The pictures of a run, with their titles: all of it, and its last iterations."""
    window = timeline.last(NUM_LAST)
    whole = [("All of the run", _draw(timeline, None))] if timeline.now_s > timeline.began_s else []
    if window is None or not whole:
        return whole
    return [*whole, ("The last iterations", _draw(timeline, window))]


def _draw(timeline: Timeline, window: tuple[float, float] | None) -> Markup:
    rows = {kind: timeline.columns(kind, COLUMNS, window) for kind in KINDS}
    if window is not None:
        processes = timeline.processes[:_MAX_PROCESSES]
        rows |= {name: timeline.columns_of(name, COLUMNS, window) for name in processes}
    rows = {name: shares for name, shares in rows.items() if any(shares)}
    start_s, end_s = window or (timeline.began_s, timeline.now_s)
    height = _ROW * len(rows) + _AXIS
    means = {name: sum(shares) / COLUMNS for name, shares in rows.items()}
    described = ", ".join(f"{name} {mean:.0%}" for name, mean in means.items())
    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            _LEFT + _WIDTH + _RIGHT, height, f"Share of {time_text(end_s - start_s)} at work: {described}."
        ),
        *_axis(start_s - timeline.began_s, end_s - timeline.began_s, height),
    ]
    for number, (name, shares) in enumerate(rows.items()):
        parts += _strip(name, shares, number * _ROW, means[name])
    return Markup("\n").join([*parts, Markup("</svg>")])


def _strip(name: str, shares: Sequence[float], top: int, mean: float) -> Iterator[Markup]:
    color = f"s{KINDS.index(name)}" if name in KINDS else "process"
    text = Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>')
    yield text.format(_LEFT - 8, top + _BAR - 2, "end", name[:_MAX_NAME])
    yield text.format(_LEFT + _WIDTH + 8, top + _BAR - 2, "start", f"{mean:.0%}")
    column = 0
    for level, equal in groupby(-(-share * _LEVELS // 1) for share in shares):
        width = len(list(equal))
        if level:
            yield Markup(
                '<rect class="strip {}" x="{}" y="{}" width="{}" height="{}" opacity="{:g}"/>'
            ).format(color, _LEFT + 2 * column, top, 2 * width, _BAR, level / _LEVELS)
        column += width


def _axis(start_s: float, end_s: float, height: int) -> Iterator[Markup]:
    """Lines at round times since the run began."""
    seconds = max(end_s - start_s, 1e-9)
    for at_s in ticks(start_s, end_s):
        x = round(_LEFT + (at_s - start_s) / seconds * _WIDTH, 1)
        if _LEFT <= x <= _LEFT + _WIDTH:
            yield Markup('<line class="grid" x1="{}" x2="{}" y1="0" y2="{}"/>').format(x, x, height - _AXIS)
            label = time_text(at_s) if seconds >= 20 else f"{at_s:g} s"
            yield Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                x, height - _AXIS + 15, label
            )


# How old the trained tokens of an asynchronous run were, and how much of the time each side worked.
_OLDEST = "rollout/staleness/max"
_PARTS = {"in flight": "flight", "in the queue": "queue"}
_GROUPS = re.compile(r"rollout/staleness/(?P<part>flight|queue)/groups_(?P<versions>\d+)")
_AGES = {
    **{label: f"rollout/staleness/{part}/mean" for label, part in _PARTS.items()},
    "oldest token": _OLDEST,
}
_WAITING = {"engine": "perf/rollout_wait_time_ratio", "trainer": "perf/wait_time_ratio"}
_BOTH = "perf/overlap_time_ratio"


def figures_of(records: Sequence[Record]) -> Iterator[tuple[Panel | Histogram, Markup, Markup]]:
    """Charts with their pictures and legends; none of a run whose batches all were of the served weights."""
    by_step = {record["step"]: record for record in records if _OLDEST in record}
    # Where a step was logged twice, the later record counts.
    steps = [by_step[step] for step in sorted(step for step in by_step if step is not None)]
    if not steps:
        return
    histogram = Histogram("Staleness of groups", "groups", "versions", _counts(steps))
    if any(histogram.bars.values()):
        yield histogram, draw_histogram(histogram), histogram_legend(histogram)
    ages = [_series(steps, label, key) for label, key in _AGES.items()]
    shares = [_series(steps, label, key, _complement) for label, key in _WAITING.items()]
    shares.append(_series(steps, "both", _BOTH))
    for panel in (
        Panel("Staleness of tokens", "versions", _drawn(ages)),
        Panel("At work", "share of the iteration", _drawn(shares), is_share=True),
    ):
        if panel.series:
            yield panel, draw(panel), legend(panel)


def _counts(steps: Sequence[Record]) -> dict[str, dict[int, int]]:
    """How many groups of all batches (count) were how many versions old, for each part of staleness."""
    counts: dict[str, Counter[int]] = {part: Counter() for part in _PARTS.values()}
    for record in steps:
        for name, value in record.items():
            if (found := _GROUPS.fullmatch(name)) and value is not None:
                counts[found["part"]][int(found["versions"])] += round(value)
    return {label: dict(counts[part]) for label, part in _PARTS.items()}


def _series(steps: Sequence[Record], label: str, key: str, of: Callable[[float], float] = float) -> Series:
    values = ((record["step"] or 0.0, record[key]) for record in steps if key in record)
    return Series(label, tuple((step, None if value is None else of(value)) for step, value in values), key)


def _complement(share: float) -> float:
    return 1.0 - share


def _drawn(curves: Sequence[Series]) -> tuple[Series, ...]:
    """The curves that have a value."""
    return tuple(curve for curve in curves if any(value is not None for _, value in curve.points))


Sections: TypeAlias = Mapping[str, Mapping[str, JSON]]
"""Settings by section and key."""


@dataclass(frozen=True, slots=True)
class ReportEpisode:
    """An episode of the report. label: its origin, e.g. "after RL"; author: of its actions."""

    label: str
    episode: Episode
    verdict: Verdict | None = None
    author: Author = Author.POLICY


@dataclass(frozen=True, slots=True)
class ReportData:
    """The contents of the page.

    title: the run's name. facts: shown at the top, e.g. {"model": "0.66 M parameters"}.
    diagnoses: faults of the training. warnings: sentences on its settings.
    rows: of the table of scores, usually before and after training. tools: of the table of tools.
    limits: of an episode. config: sections of settings; defaults: those of a run where nothing was set.
    folder: of the run, for the command that makes pages of all its episodes; "" = it has none.
    timeline: when each side worked; None = it is not shown.
    decode_token: the text of one token id; episodes without tokens do not need it.
    """

    title: str
    rows: Sequence[ScoreRow]
    records: Sequence[Record]
    episodes: Sequence[ReportEpisode]
    decode_token: Callable[[int], str]
    facts: Mapping[str, str] = field(default_factory=dict)
    config: Sections = field(default_factory=dict)
    folder: str = ""
    diagnoses: Sequence[Diagnosis] = ()
    warnings: Sequence[str] = ()
    tools: Sequence[ToolRow] = ()
    limits: Mapping[str, JSON] = field(default_factory=dict)
    defaults: Sections = field(default_factory=dict)
    timeline: Timeline | None = None

    @property
    def own_settings(self) -> Sections:
        """The settings with other values than their defaults, by section."""
        own = {
            section: {key: value for key, value in values.items() if value != self._default(section, key)}
            for section, values in self.config.items()
        }
        return {section: values for section, values in own.items() if values}

    def _default(self, section: str, key: str) -> JSON:
        return self.defaults.get(section, {}).get(key)


def write_report(data: ReportData, path: Path) -> Path:
    """Write the page atomically and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(path, render_report(data), errors="replace")
    return path


def render_report(data: ReportData) -> str:
    """The page as HTML."""
    lines = tuple(lines_of(data.rows))
    return render_page(
        "report.html",
        data=data,
        stages=stages_of(data.rows),
        lines=lines,
        has_bars=all(0 <= value <= 1 for line in lines for value in line.values if value is not None),
        tools=tool_table(data.tools),
        pictures=[] if data.timeline is None else pictures(data.timeline),
        panels=[(panel, draw(panel), legend(panel)) for panel in panels_of(data.records)],
        ages=[*figures_of(data.records)],
        episodes=[_EpisodeView(entry, data.decode_token) for entry in data.episodes],
        authors=list(NAMES.values()),
        has_frozen=any(entry.episode.frozen_agents for entry in data.episodes),
    )


def render_page(template: str, **values: object) -> str:
    """A page as HTML. Every text on it is escaped: text of a model is untrusted."""
    pages = Environment(
        loader=PackageLoader("agentrl.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(visible=visible, score=score_text, setting=setting_text)
    return pages.get_template(template).render(values)


class _EpisodeView:
    """One episode as the template reads it."""

    def __init__(self, entry: ReportEpisode, decode: Callable[[int], str]) -> None:
        episode = entry.episode
        self.label = entry.label
        self.summary = summary_of(episode, entry.verdict)
        self.verdict = entry.verdict
        self.failure = episode.failure
        self.answer = episode.task.answer
        self.blocks = list(blocks_of(episode, decode, entry.author))
        self.tokens = list(token_rows(episode, decode, entry.author))
