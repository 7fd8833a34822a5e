"""A Dockerfile as its instructions; what they do is not decided here."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_ASSIGNMENT = re.compile(r"\w+=")
_FLAG = re.compile(r"--([a-z]+)(?:=(\S*))?\s+")


class Instruction(NamedTuple):
    """One instruction. name: in capitals. text: what follows it, continued lines joined."""

    name: str
    text: str

    @property
    def is_document(self) -> bool:
        """Whether it goes on in a here-document."""
        return re.search(r"<<-?[\"']?\w", self.text) is not None

    def flags(self) -> tuple[dict[str, str], str]:
        """The flags before its arguments, and these."""
        found, rest = {}, self.text
        while match := _FLAG.match(rest):
            found[match[1]] = match[2] or ""
            rest = rest[match.end() :]
        return found, rest

    def words(self) -> list[str]:
        """Its arguments, in the form of JSON or of a shell.

        Raises:
            ValueError: they are neither.
        """
        rest = self.flags()[1]
        listed = _listed(rest)
        return shlex.split(rest) if listed is None else listed

    def command(self) -> str:
        """The command of a RUN.

        Raises:
            ValueError: it cannot be read.
        """
        rest = self.flags()[1]
        listed = _listed(rest)
        return rest if listed is None else shlex.join(listed)

    def assignments(self) -> dict[str, str]:
        """The variables of an ENV: `A=1 B=2`, or `A 1`.

        Raises:
            ValueError: they cannot be read.
        """
        words = shlex.split(self.text)
        if words and not _ASSIGNMENT.match(words[0]):
            name, _, value = self.text.partition(" ")
            return {name: value.strip()}
        pairs = [word.partition("=") for word in words]
        if any(not separator for _, separator, _ in pairs):
            raise ValueError("a variable without a value")
        return {name: value for name, _, value in pairs}


def instructions(text: str) -> Sequence[Instruction]:
    """The instructions of a Dockerfile, in order."""
    return [
        Instruction(name.upper(), rest.strip())
        for name, _, rest in (line.strip().partition(" ") for line in _lines(text))
        if name
    ]


def _lines(text: str) -> Iterator[str]:
    """Lines without comments; those that end with a backslash are joined with the next one."""
    joined = ""
    for line in text.replace("\t", " ").splitlines():
        if line.lstrip().startswith("#"):
            continue
        stripped = line.rstrip()
        if stripped.endswith("\\"):
            joined += f"{stripped[:-1]} "
            continue
        yield joined + stripped
        joined = ""
    yield joined


def _listed(text: str) -> list[str] | None:
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


_SEPARATORS = re.compile(r"&&|\|\||[;|\n]|\$\(|`|\bthen\b|\bdo\b|\belse\b")
_WORD = re.compile(r"[A-Za-z0-9_./+-]+")


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a script, as words: by sight, strings and here-documents are not told apart."""
    joined = text.replace("\\\n", " ")
    lines = "\n".join(line for line in joined.splitlines() if not line.lstrip().startswith("#"))
    for part in _SEPARATORS.split(lines):
        words = part.split()
        while words and (_ASSIGNMENT.match(words[0]) or words[0] in ("if", "!", "(", "{", "exec")):
            words = words[1:]
        if words and _WORD.fullmatch(words[0]):
            yield words
