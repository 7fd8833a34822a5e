"""Seeded repositories: a program with a fault, its README, its tests and its history; and hidden calls."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from envs_contrib.repositories import history
from envs_contrib.repositories.patterns import filled
from envs_contrib.repositories.programs import LANGUAGES, Call, Fault, Program, program

NAMES = ("tessa", "orlin", "quado", "brevin", "lumo", "karst", "welf", "ondra", "pell", "sorrel")
NUM_HIDDEN = 24
"""Hidden calls of a repository, besides the visible ones."""
TESTS = "tests"
RUN_TESTS = "run_tests.sh"
_RUN_TESTS = """#!/bin/sh
# Runs every test, and shows where the output is another one. A test is a folder: the command, its input, and
# the output and the exit code that are right.
export LC_ALL=C
found=$(mktemp)
failed=0
for folder in tests/*/; do
    sh "${folder}command" < "${folder}stdin" > "$found" 2> "$found.errors"
    code=$?
    if [ "$code" = "$(cat "${folder}code")" ] && cmp -s "${folder}stdout" "$found"; then
        echo "ok     $folder"
    else
        echo "FAILED $folder $(cat "${folder}command")"
        [ "$code" = "$(cat "${folder}code")" ] || echo "exit code $code, not $(cat "${folder}code")"
        diff "${folder}stdout" "$found"
        tail -n 3 "$found.errors"
        failed=1
    fi
done
rm -f "$found" "$found.errors"
exit $failed
"""


class Repository(NamedTuple):
    """files: text by path, with the fault. correct: those of the program without it. calls: the grader's.

    command: runs the program. num_visible: of the calls, the first ones, whose outcomes are known.
    """

    name: str
    language: str
    fault: Fault
    path: str
    files: Mapping[str, str]
    correct: Mapping[str, str]
    prepare: str
    command: Sequence[str]
    calls: Sequence[Call]
    num_visible: int

    @property
    def correct_text(self) -> str:
        """The text of the file with the fault, without it."""
        return self.correct[self.path]


@lru_cache(maxsize=512)
def repository(name: str, number: int, seed: str) -> Repository:
    """The repository of a program with one of its faults. seed: of its names, its history and hidden calls.

    Raises:
        FileNotFoundError, IndexError: there is no such program or fault.
    """
    rng = random.Random(f"{name} {number} {seed}")
    language, whole = name.partition("/")[0], program(name)
    renaming = {word: rng.choice(others) for word, others in whole.words.items()}
    correct = {path: _renamed(text, renaming) for path, text in whole.texts.items()}
    fault = whole.faults[number]
    path = next(path for path, text in whole.texts.items() if fault.old in text)
    old, new = _renamed(fault.old, renaming), _renamed(fault.new, renaming)
    broken = {**correct, path: correct[path].replace(old, new)}
    command = (*LANGUAGES[language], whole.path)
    title = rng.choice(NAMES)
    commits = history.commits(_changes(title, whole, command, broken), rng)
    files = {path: text for commit in commits for path, text in commit.files.items()}
    prepare = history.preparation(commits) if history.has_git() else ""
    if not prepare:
        files[history.LOG] = history.log(commits)
    calls = (*whole.visible, *hidden(whole, rng))
    visible = len(whole.visible)
    return Repository(title, language, fault, path, files, correct, prepare, command, calls, visible)


def hidden(whole: Program, rng: random.Random) -> list[Call]:
    """Calls of the program's patterns, in turns. Their outcomes are those of the correct program."""
    patterns = [whole.hidden[place % len(whole.hidden)] for place in range(NUM_HIDDEN)]
    return [
        Call(tuple(filled(arg, rng) for arg in pattern.args), filled(pattern.stdin, rng))
        for pattern in patterns
    ]


def _renamed(text: str, renaming: Mapping[str, str]) -> str:
    """The text as a file begins, with these names in the place of others."""
    for word, other in renaming.items():
        text = re.sub(rf"\b{word}\b", other, text)
    return text


def _changes(
    title: str, whole: Program, command: Sequence[str], broken: Mapping[str, str]
) -> list[tuple[str, Mapping[str, str]]]:
    """What each commit says and adds. The program comes with its fault, and is not touched again."""
    readme = f"# {title}\n\n{whole.summary}\n\n{whole.usage}"
    tests = [_test(place, call, command) for place, call in enumerate(whole.visible, start=1)]
    later = {path: text for files in tests[1:] for path, text in files.items()}
    return [
        ("Say what the program is to do", {"README.md": readme}),
        (f"Write {title}", broken),
        ("Test it", {RUN_TESTS: _RUN_TESTS, **tests[0]}),
        ("Say how to run the tests", {"README.md": f"{readme}\nTests: `sh {RUN_TESTS}`\n"}),
        ("Add tests of what users have reported", later),
    ]


def _test(place: int, call: Call, command: Sequence[str]) -> dict[str, str]:
    folder = f"{TESTS}/{place}"
    return {
        f"{folder}/command": f"{shlex.join([*command, *call.args])}\n",
        f"{folder}/stdin": call.stdin,
        f"{folder}/stdout": call.stdout,
        f"{folder}/code": f"{call.code}\n",
    }
