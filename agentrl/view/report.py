"""A run as one page: a table, curves, episodes token by token. No script, nothing fetched."""

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
class ShownEpisode:
    """An episode to show. label: where it comes from, e.g. "after RL"; author: who wrote its actions."""

    label: str
    episode: Episode
    verdict: Verdict | None = None
    author: Author = Author.POLICY


@dataclass(frozen=True, slots=True)
class ReportData:
    """All that stands on the page.

    title: the run's name. facts: what a reader wants to know first, e.g. {"model": "0.66 M
    parameters"}. rows: the table, best told as before / after. config: sections of settings.
    decode_token: the text of one token id; episodes without tokens do not need it.
    """

    title: str
    rows: Sequence[ScoreRow]
    records: Sequence[Record]
    episodes: Sequence[ShownEpisode]
    decode_token: Callable[[int], str]
    facts: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)


def write_report(data: ReportData, path: Path) -> Path:
    """Write the page, whole or not at all, and return its path.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(path.name + ".part")
    # What a model wrote may be no Unicode at all; `visible` has made most of it readable.
    unfinished.write_text(render_report(data), encoding="utf-8", errors="replace")
    os.replace(unfinished, path)
    return path


def render_report(data: ReportData) -> str:
    """The page as HTML. Every text on it is escaped: the model's is not to be trusted."""
    pages = Environment(
        loader=PackageLoader("agentrl.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters.update(visible=visible, score=score_text)
    return pages.get_template("report.html").render(
        data=data,
        columns=columns_of(data.rows),
        has_bars=_are_shares(data.rows),
        panels=[(panel, draw(panel), legend(panel)) for panel in panels_of(data.records)],
        shown=[_Shown(one, data.decode_token) for one in data.episodes],
        authors=list(NAMES.values()),
        has_frozen=any(one.episode.frozen_agents for one in data.episodes),
    )


class _Shown:
    """One episode as the template sees it."""

    def __init__(self, shown: ShownEpisode, decode: Callable[[int], str]) -> None:
        episode = shown.episode
        self.label = shown.label
        self.summary = summary_of(episode, shown.verdict)
        self.verdict = shown.verdict
        self.failure = episode.failure
        self.answer = episode.task.answer
        self.blocks = list(blocks_of(episode, decode, shown.author))
        self.tokens = list(token_rows(episode, decode, shown.author))


def _are_shares(rows: Sequence[ScoreRow]) -> bool:
    return all(value is None or 0 <= value <= 1 for row in rows for value in row.scores.values())
