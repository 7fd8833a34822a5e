"""The table of a benchmark: on the terminal, as JSON, and as one page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import cast

from rich import box
from rich.table import Table
from rich.text import Text

from agentrl.errors import ConfigError
from agentrl.files import write_text
from agentrl.observe.lines import object_of
from agentrl.ownership import read_file
from agentrl.types import JSON
from agentrl.view.episodes.journals import INDEX, PAGES, JournalFile, find_journals, link_to
from agentrl.view.report import render_page
from agentrl.view.scores import figure_text, score_text
from agentrl.view.transcript import visible

TABLE, PAGE = "benchmark.json", "benchmark.html"
Row = Mapping[str, JSON]

LEGEND = (
    "[low, high]: 95% interval; (w) Wilson's, (b) bootstrap over tasks. Failed episodes are in no mean. "
    "tokens: written by the policy per episode. violations: calls that tools refuse or cannot read."
)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The folder of a benchmark and the rows of its table: a cell each, those of an environment together."""

    folder: Path
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, folder: Path) -> Benchmark:
        """Read the table of a folder.

        Raises:
            ConfigError: there is none.
        """
        try:
            table = object_of(read_file(folder / TABLE), TABLE)
            return cls(folder, tuple(cast(list[Row], table["rows"])))
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{folder} holds no benchmark; name the output_dir of an `agentrl benchmark`."
            ) from None

    @property
    def is_complete(self) -> bool:
        """Whether every cell has a score."""
        return all(row["mean"] is not None for row in self.rows)

    def as_json(self) -> dict[str, JSON]:
        """The content of benchmark.json."""
        rows: list[JSON] = [dict(row) for row in self.rows]
        return {"format": 1, "agentrl": version("agentrl"), "folder": str(self.folder), "rows": rows}

    def write(self) -> None:
        """Write the table and the page, each whole or not at all."""
        write_text(self.folder / TABLE, json.dumps(self.as_json(), indent=1) + "\n")
        self.write_page()

    def write_page(self) -> None:
        """Write the page alone."""
        write_text(self.folder / PAGE, self.page(), errors="replace")

    def page(self) -> str:
        """The table as HTML, with links to the pages of `agentrl view` where they are in the folder."""
        links = self._links()
        return render_page(
            "benchmark.html",
            title=self.folder.resolve().name,
            episodes=f"{PAGES}/{INDEX}" if links else None,
            columns=list(_COLUMNS),
            rows=[
                {
                    "env": row["env"],
                    "policy": row["policy"],
                    "episodes": links.get(str(row.get("folder"))),
                    "note": _note(row),
                    "cells": [text(row) for text in _COLUMNS.values()],
                    "details": list(_details(row)),
                }
                for row in self.rows
            ],
            legend=LEGEND,
        )

    def _links(self) -> Mapping[str, str]:
        """The address of the episodes of a cell, by the folder of the cell."""
        if not (self.folder / PAGES / INDEX).exists():
            return {}
        by_cell: dict[str, list[JournalFile]] = {}
        with suppress(ConfigError):
            for journal in find_journals(self.folder):
                by_cell.setdefault(journal.home.relative_to(self.folder).as_posix(), []).append(journal)
        return {cell: f"{PAGES}/{link_to(journals)}" for cell, journals in by_cell.items()}

    def table(self) -> Table:
        """The table for a terminal."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=Text(LEGEND), caption_justify="left")
        for name in ("environment", "policy"):
            table.add_column(name, overflow="fold")
        # A terminal is narrow: what no cell has is left out.
        texts = {name: [text(row) for row in self.rows] for name, text in _COLUMNS.items()}
        columns = {name: column for name, column in texts.items() if not _NOTHING.issuperset(column)}
        for name in columns:
            table.add_column(name, justify="right", overflow="fold")
        for row, *cells in zip(self.rows, *columns.values(), strict=True):
            names = (str(row["env"]), str(row["policy"]))
            table.add_row(*(Text(visible(cell)) for cell in (*names, *cells)))
        return table

    def notes(self) -> Iterator[str]:
        """A line for every cell without a score, with the reason."""
        for row in self.rows:
            if note := _note(row):
                yield visible(f"{row['env']}, {row['policy']}: {note}")


def link_episodes(folder: Path) -> None:
    """Write the page of a benchmark again, whose links lead to its episodes; nothing in another folder."""
    with suppress(ConfigError):
        Benchmark.read(folder).write_page()


def estimate_text(value: JSON) -> str:
    """A value with its interval and the method of that; a dash where nothing was measured."""
    if not isinstance(value, dict):
        return score_text(None)
    numbers = cast(dict[str, float], value)
    return f"{numbers['value']:.3f} [{numbers['low']:.3f}, {numbers['high']:.3f}] ({str(value['method'])[0]})"


def _played(row: Row) -> str:
    return f"{row['scored']}/{row['planned']}" if "planned" in row else str(row["state"])


def _pass_at(row: Row) -> str:
    pass_at = _of(row, "pass_at")
    if not pass_at:
        return ""
    k = max(pass_at, key=int)
    return f"@{k}: {estimate_text(pass_at[k])}"


def _number(name: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        value = row.get(name)
        return figure_text(value) if isinstance(value, int | float) else ""

    return text


def _total(name: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        counts = cast(Mapping[str, int], _of(row, name))
        return "" if name not in row else str(sum(counts.values()))

    return text


def _kinds(row: Row) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in _of(row, "failures").items())


def _of(row: Row, name: str) -> Mapping[str, JSON]:
    value = row.get(name)
    return value if isinstance(value, dict) else {}


_NOTHING = frozenset({"", "0", "0.000"})
_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "scored": _played,
    "mean": lambda row: estimate_text(row["mean"]),
    "pass@k": _pass_at,
    "turns": _number("turns"),
    "tokens": _number("tokens"),
    "cost": _number("cost"),
    "violations": _total("violations"),
    "invalid moves": _number("invalid_moves"),
    "failures": _kinds,
}


def _note(row: Row) -> str:
    """Why a cell has no score; empty where it has one."""
    if row["state"] == "error":
        return str(row["error"])
    if row["state"] == "waiting":
        return "not played yet"
    return "" if row["mean"] is not None else "every episode failed"


def _details(row: Row) -> Iterator[tuple[str, str]]:
    """What the columns leave out, by name."""
    for k, estimate in _of(row, "pass_at").items():
        yield f"pass@{k}", estimate_text(estimate)
    for name in ("by", "parts", "endings", "violations", "failures"):
        yield from ((f"{name}: {key}", _figure(value)) for key, value in _of(row, name).items())
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_per_episode", "folder"):
        if row.get(name) is not None:
            yield name.replace("_", " "), _figure(row[name])


def _figure(value: JSON) -> str:
    return figure_text(value) if isinstance(value, int | float | str) else str(value)
