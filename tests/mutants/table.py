"""The table of planted bugs: read from mutants.toml, checked, planted into a copy of the tree."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "mutants.toml"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug: in `file`, the only place that reads `old` reads `new`, and a test of `tests` turns red.

    full: some of its tests are too long for the quick tier.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    full: bool = False


class StaleMutantError(Exception):
    """The snippet does not stand in the file exactly once: the table has to follow the code."""


def load() -> tuple[Mutant, ...]:
    """Every mutant of the table, in its order."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return tuple(Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows)


def mutated(mutant: Mutant, source: str) -> str:
    """`source` with the bug in it.

    Raises:
        StaleMutantError: the snippet is not there exactly once.
    """
    count = source.count(mutant.old)
    if count != 1:
        raise StaleMutantError(f"{mutant.name}: the old snippet stands {count} times in {mutant.file}")
    return source.replace(mutant.old, mutant.new)
