"""The fenced code blocks of the documentation, and the meaning of their info strings.

    ```bash test     runs in `make test`
    ```bash full     runs in `make test-full`
    ```bash fresh    likewise, in a virtual environment that the document makes itself (test_first_agent.py)
    ```bash check    is too long or too far-reaching to run: its commands and flags must exist
    ```python test   runs in `make test`; `python full` likewise in `make test-full`
    ```python clients  likewise, with the interpreter that has clients of others (.venv-clients)
    ```python test file=my_env.py    is also kept under that name for the blocks below it

All blocks of one document run in order in one empty folder that holds a copy of examples/.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELLS = {"bash", "sh", "shell", "console"}
MARKS = {"test", "full", "fresh", "check", "clients"}
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>\S[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language, its mark, the name it is kept under, and its text."""

    where: str
    language: str
    mark: str
    file: str | None
    text: str

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """The words of every command line, continued lines joined; without comments, and without the file
        that the output goes to."""
        lines = self.text.replace("\\\n", " ").splitlines()
        split = (shlex.split(line, comments=True) for line in lines)
        return tuple(tuple(words[: words.index(">")] if ">" in words else words) for words in split if words)


def documents() -> tuple[Path, ...]:
    """Every Markdown file with commands for readers."""
    patterns = ("*.md", "docs/**/*.md", "examples/**/*.md", "envs_contrib/**/*.md", "skills/**/*.md")
    return tuple(path for pattern in patterns for path in sorted(ROOT.glob(pattern)))


def blocks(markdown: str, name: str) -> Iterator[Block]:
    """The shell and Python blocks of a document.

    Raises:
        ValueError: a block has no mark, or an unknown one.
    """
    for match in FENCE.finditer(markdown):
        language, *words = match["info"].split()
        if language not in SHELLS | {"python"}:
            continue
        where = f"{name}, line {markdown[: match.start()].count(chr(10)) + 1}"
        file = next((word.removeprefix("file=") for word in words if word.startswith("file=")), None)
        marks = [word for word in words if word in MARKS]
        if len(marks) != 1 or len(words) != len(marks) + (file is not None):
            raise ValueError(f"{where}: say `{language}` and one of {', '.join(sorted(MARKS))}")
        yield Block(where, language, marks[0], file, match["text"])
