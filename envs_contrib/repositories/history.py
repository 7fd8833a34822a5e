"""The history of a repository: commits of git, or a file of the same messages where there is no git.

No commit holds the program without its fault: it was written with it, and the rest came later.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple

AUTHORS = ("Ada Lind", "Ruben Okafor", "Mei Tanaka", "Jo Petrov")
LOG = "HISTORY.md"
_FIRST_S = 1_700_000_000
_END = "END OF THE HISTORY"
_BRANCH = "refs/heads/main"


class Commit(NamedTuple):
    """A change. files: what it adds, or changes: text by path."""

    message: str
    author: str
    time_s: int
    files: Mapping[str, str]


def has_git() -> bool:
    """Whether a shell of the sandbox has git."""
    return shutil.which("git", path="/usr/bin:/bin") is not None


def commits(changes: Sequence[tuple[str, Mapping[str, str]]], rng: random.Random) -> list[Commit]:
    """Commits of these messages and files, with authors and times."""
    time_s, made = _FIRST_S + rng.randint(0, 10**7), []
    for message, files in changes:
        made.append(Commit(message, rng.choice(AUTHORS), time_s, files))
        time_s += rng.randint(3600, 10**6)
    return made


def preparation(history: Sequence[Commit]) -> str:
    """A command that makes the history of the folder, whose files are already those of the last commit."""
    return (
        "git init -q -b main --template= . && "
        f"git fast-import --quiet <<'{_END}' && git reset -q\n{stream(history)}\n{_END}\n"
        "printf '[user]\\n\\tname = Sam\\n\\temail = sam@example.org\\n' >> .git/config\n"
        "printf '.agent/\\n' > .git/info/exclude 2> /dev/null ||"
        " { mkdir .git/info; printf '.agent/\\n' > .git/info/exclude; }\n"
    )


def stream(history: Sequence[Commit]) -> str:
    """The commits as git-fast-import reads them: lengths are in bytes."""
    lines = []
    for commit in history:
        who = f"{commit.author} <{commit.author.split()[0].lower()}@example.org> {commit.time_s} +0000"
        lines += [f"commit {_BRANCH}", f"author {who}", f"committer {who}", _data(commit.message)]
        lines += [f"M 100644 inline {path}\n{_data(text)}" for path, text in commit.files.items()]
    return "\n".join([*lines, "done"])


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}"


def log(history: Sequence[Commit]) -> str:
    """The history in words, the last change first."""
    lines = [f"- {c.message} ({c.author}: {', '.join(c.files)})" for c in reversed(history)]
    return "\n".join(["# History", "", *lines, ""])
