"""The table of planted bugs: laws.toml and kernels.toml, read and checked.

A `[[law]]` has the words of a law in docs/architecture.md, a `[[kernel]]` the name of a computation. Below
stand its bugs:

    name    what the bug does
    where   the qualified name of a function, a class or a constant, wherever in the package it is
    path    part of the path of its file; only where `where` alone is ambiguous
    old     an expression, statements or `keyword=value`: the pattern of what is replaced (patterns.py)
    new     what replaces it; `...` where it just goes
    tests   files, folders or `file::test`, the fastest first: one of these tests must turn red. Those of the
            quick tier run, or whatever `file::test[parameters]` names
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.mutants.patterns import Pattern, Replacement

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
TABLES = {"law": FOLDER / "laws.toml", "kernel": FOLDER / "kernels.toml"}
MOST_BUGS = 120


@dataclass(frozen=True)
class Bug:
    """One bug, what it is planted against, where it goes, and the tests that must notice it."""

    target: str
    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]
    path: str = ""

    @cached_property
    def replacement(self) -> Replacement:
        """What the bug does to a syntax tree.

        Raises:
            SyntaxError: `old` or `new` is no Python.
        """
        return Replacement(Pattern.of(self.old), Pattern.of(self.new))


def targets(kind: str) -> tuple[str, ...]:
    """The laws, or the kernels, that bugs are planted against, as the tables name them."""
    return tuple(entry["name"] for entry in tomllib.loads(TABLES[kind].read_text(encoding="utf-8"))[kind])


def load() -> tuple[Bug, ...]:
    """Every bug of both tables, in their order."""
    entries = [
        entry
        for kind, path in TABLES.items()
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))[kind]
    ]
    return tuple(
        Bug(entry["name"], **{**row, "tests": tuple(row["tests"])})
        for entry in entries
        for row in entry["bug"]
    )
