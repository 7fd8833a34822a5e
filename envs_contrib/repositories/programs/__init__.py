"""The programs of the suite: a file for each, with its text, its faults, its tests and patterns of others.

summary, usage      of its README.md
path, source        of the program; [files] = others that it needs
hidden              patterns of calls that only the grader makes (`patterns.py`)
[words]             names in the texts, each with the names that it may have instead
[[faults]]          a change of one text: `old` occurs once. The last one is in the test split only.
[[visible]]         a call, and what it has to print; every fault makes at least one of them fail
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

LANGUAGES: Mapping[str, Sequence[str]] = {
    "python": ("python3",),
    "shell": ("sh",),
    "awk": ("awk", "-f"),
    "perl": ("perl",),
}
"""By language: the command that runs a file of it."""
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Call:
    """A call of a program. stdout, code: what it has to print, and its exit code."""

    args: tuple[str, ...] = ()
    stdin: str = ""
    stdout: str = ""
    code: int = 0


@dataclass(frozen=True)
class Fault:
    """A change of a text. kind: of mistake."""

    kind: str
    old: str
    new: str


@dataclass(frozen=True)
class Program:
    """A correct program; see the top of the module."""

    summary: str
    usage: str
    path: str
    source: str
    hidden: tuple[Call, ...]
    faults: tuple[Fault, ...]
    visible: tuple[Call, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, str]:
        """All files of it."""
        return {self.path: self.source, **self.files}


_PROGRAM = TypeAdapter(Program)


def names() -> tuple[str, ...]:
    """Of all programs, `LANGUAGE/NAME`: the first ones of each language come first."""
    by_language = [sorted(path.stem for path in (_FOLDER / name).glob("*.toml")) for name in LANGUAGES]
    ordered = [
        (place, name, stem)
        for name, stems in zip(LANGUAGES, by_language, strict=True)
        for place, stem in enumerate(stems)
    ]
    return tuple(f"{name}/{stem}" for _, name, stem in sorted(ordered, key=lambda entry: entry[0]))


@cache
def program(name: str) -> Program:
    """The program of a name.

    Raises:
        FileNotFoundError: there is none.
    """
    table = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return _PROGRAM.validate_python(table)
