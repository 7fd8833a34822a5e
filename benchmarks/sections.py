"""Sections of a benchmark: those that are chosen, and the rows that they make."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from agentrl.errors import UserError, did_you_mean
from agentrl.types import JSON


class ResultRow(NamedTuple):
    """A line of the summary, and its figures."""

    name: str
    line: str
    figures: dict[str, JSON]


def words_of(text: str) -> list[str]:
    """The names in a text, which commas separate."""
    return [word.strip() for word in text.split(",") if word.strip()]


def chosen(only: Sequence[str], names: Collection[str], kind: str = "section") -> list[str]:
    """Those of `names` that are in `only`, in their own order; all of them where it is empty.

    Raises:
        UserError: there is no such name.
    """
    if unknown := [name for name in only if name not in names]:
        raise UserError(
            f"There is no {kind} `{unknown[0]}`; there are {', '.join(names)}."
            f"{did_you_mean(unknown[0], names)}"
        )
    return [name for name in names if name in only or not only]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread during the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reported(rows: Sequence[tuple[str, ResultRow]]) -> dict[str, JSON]:
    """The rows, each with its section, as JSON. summary: a line for each. rows: their figures."""
    return {
        "summary": {row.name: row.line for _, row in rows},
        "rows": [{"section": name, "name": row.name, "line": row.line, **row.figures} for name, row in rows],
    }


def as_json(values: Mapping[str, object]) -> dict[str, JSON]:
    """Plain values: a round trip through JSON turns tuples into lists, as in the printed JSON."""
    return cast(dict[str, JSON], json.loads(json.dumps(values)))
