"""The table of planted bugs: laws.toml and kernels.toml, read and checked.

A `[[law]]` has the text of a law in docs/architecture.md, a `[[kernel]]` the name of a computation. Its bugs
follow:

    name    what the bug does
    where   the qualified name of a function, a class or a constant, anywhere in the package
    path    part of the path of its file; only where `where` alone is ambiguous
    old     an expression, statements or `keyword=value`: the pattern of what is replaced (patterns.py)
    new     what replaces it; `...` where it is removed
    tests   files, folders or `file::test`, the fastest first: one of these tests must fail. Those of the
            quick tier run, and any `file::test[parameters]`
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
MAX_BUGS = 220


@dataclass(frozen=True)
class Bug:
    """One bug: its target, its place, and the tests that must detect it."""

    target: str
    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]
    path: str = ""

    @cached_property
    def replacement(self) -> Replacement:
        """The change of the bug to a syntax tree.

        Raises:
            SyntaxError: `old` or `new` is no Python.
        """
        return Replacement(Pattern.of(self.old), Pattern.of(self.new))


def targets(kind: str) -> tuple[str, ...]:
    """The laws, or the kernels, that bugs are planted against, by name."""
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
