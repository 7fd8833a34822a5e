"""A run as one HTML page: a table, curves, episodes token by token; without scripts or external files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined

from agentrl.records import Record
from agentrl.records.diagnoses import Diagnosis
from agentrl.records.timeline import Timeline
from agentrl.runtime.files import write_text
from agentrl.types import JSON, Author, Episode, Verdict
from agentrl.view.chart import draw, legend
from agentrl.view.panels import panels_of
from agentrl.view.scores import ScoreRow, ToolRow, lines_of, score_text, setting_text, stages_of, tool_table
from agentrl.view.staleness import figures_of
from agentrl.view.timeline import pictures
from agentrl.view.tokens import NAMES, blocks_of, token_rows
from agentrl.view.transcript import summary_of, visible

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
