"""The table of a benchmark: on the terminal, as JSON, and as one page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import cast

from rich import box
from rich.table import Table
from rich.text import Text

from agentrl.errors import ConfigError
from agentrl.records.lines import object_of
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import read_file
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
_METHOD = re.compile(r"(?<=]) \([wb]\)")


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
        """The tables of the environments as HTML, with links to the pages of `agentrl view` where they are in
        the folder."""
        links, columns = self._links(), self._columns()
        return render_page(
            "benchmark.html",
            title=self.folder.resolve().name,
            episodes=f"{PAGES}/{INDEX}" if links else None,
            columns=[*columns],
            tables={
                env: [
                    {
                        "policy": row["policy"],
                        "episodes": links.get(str(row.get("folder"))),
                        "note": _note(row),
                        "bar": _bar(row, _scale([self.rows[other] for other in numbers])),
                        "cells": [column[number] for column in columns.values()],
                        "details": list(_details(row)),
                    }
                    for number, row in ((number, self.rows[number]) for number in numbers)
                ]
                for env, numbers in self._by_env().items()
            },
            earned=[*self._earned()],
            legend=LEGEND,
        )

    def _earned(self) -> Iterator[tuple[str, str, str]]:
        """The table of what tools earn, line by line: a name, the mean, and the difference to it.

        A line for an environment and a policy as they are, and one after it for each way in which a tool was
        broken.
        """
        broken: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.get("again") is not None:
                broken.setdefault((str(row["again"]), str(row["policy"])), []).append(row)
        for row in self.rows:
            env, policy = str(row["env"]), str(row["policy"])
            if (env, policy) in broken:
                yield f"{env}, {policy}", estimate_text(row["mean"]), ""
            for other in broken.get((env, policy), ()):
                how = str(other["env"]).removeprefix(env).lstrip("/,")
                yield f"  {how}", estimate_text(other["mean"]), estimate_text(other.get("difference"))

    def _by_env(self) -> dict[str, list[int]]:
        """The numbers of the rows of each environment."""
        by_env: dict[str, list[int]] = {}
        for number, row in enumerate(self.rows):
            by_env.setdefault(str(row["env"]), []).append(number)
        return by_env

    @property
    def _plays_alike(self) -> bool:
        """Whether all cells have scored all episodes, and as many as the others."""
        return len({_played(row) for row in self.rows if row["state"] == "done"}) == 1 and all(
            row.get("scored") == row.get("planned") for row in self.rows
        )

    def _columns(self) -> dict[str, list[str]]:
        """The cells of all rows by column, without the columns in which no row has anything."""
        texts = {name: [text(row) for row in self.rows] for name, text in _COLUMNS.items()}
        return {name: column for name, column in texts.items() if not _NOTHING.issuperset(column)}

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
        """The table for a terminal of 80 columns, with a heading for each environment."""
        caption = LEGEND.replace("; (w) Wilson's, (b) bootstrap over tasks", "")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=Text(caption), caption_justify="left")
        table.add_column("policy", overflow="fold")
        columns = {
            name: [_METHOD.sub("", cell) for cell in column]
            for name, column in self._columns().items()
            if not (name == "scored" and self._plays_alike)
        }
        for name, column in columns.items():
            # An interval is not cut in two.
            width = max(map(len, column)) if name == "mean" else max(map(_longest_part, column))
            table.add_column(name, justify="right", overflow="fold", min_width=width)
        for env, numbers in self._by_env().items():
            if numbers[0]:
                table.add_section()
            table.add_row(Text(visible(env), style="bold"), *("" for _ in columns))
            for number in numbers:
                cells = (Text(visible(column[number])) for column in columns.values())
                table.add_row(Text(f"  {visible(str(self.rows[number]['policy']))}"), *cells)
        return table

    def tools_table(self) -> Table | None:
        """What tools earn, for a terminal of 80 columns; None = no tool was broken."""
        lines = [*self._earned()]
        if not lines:
            return None
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="What tools earn", title_justify="left")
        table.add_column("", overflow="fold")
        for name in ("mean", "difference"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, *figures in lines:
            table.add_row(Text(visible(name)), *(Text(_METHOD.sub("", figure)) for figure in figures))
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


def _longest_part(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _scale(rows: Sequence[Row]) -> tuple[float, float]:
    """From 0 to 1, or as far as the intervals of an environment's cells reach."""
    estimates = [cast(Mapping[str, float], row["mean"]) for row in rows if isinstance(row["mean"], dict)]
    low = min([0.0, *(estimate["low"] for estimate in estimates)])
    return low, max([1.0, *(estimate["high"] for estimate in estimates)])


def _bar(row: Row, scale: tuple[float, float]) -> Mapping[str, float] | None:
    """Where the mean and its interval are on a scale (percent); None = there is no score."""
    if not isinstance(row["mean"], dict):
        return None
    estimate, (low, high) = cast(Mapping[str, float], row["mean"]), scale
    at = {name: 100 * (estimate[name] - low) / (high - low) for name in ("low", "value", "high")}
    return {**at, "zero": 100 * (0.0 - low) / (high - low)}


def _note(row: Row) -> str:
    """Why a cell has no score; empty where it has one."""
    if row["state"] == "error":
        return str(row["error"])
    if row["state"] == "waiting":
        return "not played yet"
    if row["mean"] is not None:
        return ""
    return f"every episode failed, the first with {row.get('first_failure') or 'no reason'}"


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
