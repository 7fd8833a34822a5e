"""A run as one HTML page: a table, curves, episodes token by token; without scripts or external files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from agentrl.observe import Record
from agentrl.types import JSON, Author, Episode, Verdict
from agentrl.view.chart import draw, legend
from agentrl.view.panels import panels_of
from agentrl.view.scores import ScoreRow, columns_of, score_text
from agentrl.view.tokens import NAMES, blocks_of, token_rows
from agentrl.view.transcript import summary_of, visible


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

    title: the run's name. facts: shown at the top, e.g. {"model": "0.66 M parameters"}. rows: of the
    table of scores, usually before and after training. config: sections of settings. folder: of the run, for
    the command that makes pages of all its episodes; "" = it has none.
    decode_token: the text of one token id; episodes without tokens do not need it.
    """

    title: str
    rows: Sequence[ScoreRow]
    records: Sequence[Record]
    episodes: Sequence[ReportEpisode]
    decode_token: Callable[[int], str]
    facts: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    folder: str = ""


def write_report(data: ReportData, path: Path) -> Path:
    """Write the page atomically and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    return save_page(render_report(data), path)


def render_report(data: ReportData) -> str:
    """The page as HTML."""
    return render_page(
        "report.html",
        data=data,
        columns=columns_of(data.rows),
        has_bars=_are_shares(data.rows),
        panels=[(panel, draw(panel), legend(panel)) for panel in panels_of(data.records)],
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
    pages.filters.update(visible=visible, score=score_text)
    return pages.get_template(template).render(values)


def save_page(page: str, path: Path) -> Path:
    """Write a page atomically and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(path.name + ".part")
    # Text of a model may be invalid Unicode; `visible` has made most of it readable.
    unfinished.write_text(page, encoding="utf-8", errors="replace")
    os.replace(unfinished, path)
    return path


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


def _are_shares(rows: Sequence[ScoreRow]) -> bool:
    return all(value is None or 0 <= value <= 1 for row in rows for value in row.scores.values())
