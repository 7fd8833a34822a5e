"""Seeded repositories: a package with a mistake, its README and its tests; and the tests of the grader."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from inspect import getsource
from typing import NamedTuple

from envs_contrib.terminal.bugs import BUGS, Bug
from envs_contrib.terminal.cases import VISIBLE, Case, hidden
from envs_contrib.terminal.inside import outcome

NAMES = ("tessa", "orlin", "quado", "brevin", "lumo", "karst", "welf", "ondra")
"""Names of packages; none is a module of the standard library."""


class Repository(NamedTuple):
    """files: text by path, with the bug. cases, outcomes: those of the grader."""

    package: str
    module: str
    bug: Bug
    files: Mapping[str, str]
    cases: Sequence[Case]
    outcomes: Sequence[str]

    @property
    def correct_text(self) -> str:
        """The text of that file without the mistake."""
        return source(self.module)

    @property
    def path(self) -> str:
        """The file with the mistake."""
        return f"{self.package}/{self.module}.py"


@lru_cache(maxsize=512)
def repository(module: str, bug_number: int, seed: str) -> Repository:
    """The repository of a module with one of its bugs. seed: of its name and the grader's cases.

    Raises:
        KeyError, IndexError: there is no such module or bug.
    """
    rng = random.Random(f"{module} {bug_number} {seed}")
    package, bug = rng.choice(NAMES), BUGS[module][bug_number]
    text = source(module)
    cases = hidden(module, rng)
    summary = text.splitlines()[0].strip('"')
    files = {
        "README.md": f"# {package}\n\n{summary}\n\nTests: `python3 -m unittest`\n",
        f"{package}/__init__.py": "",
        f"{package}/{module}.py": text.replace(bug.old, bug.new),
        "tests/__init__.py": "",
        f"tests/test_{module}.py": _tests(package, module),
    }
    return Repository(package, module, bug, files, cases, outcomes(module, cases))


def source(module: str) -> str:
    """The text of a correct module."""
    return getsource(import_module(f"envs_contrib.terminal.packages.{module}"))


def outcomes(module: str, cases: Sequence[Case]) -> list[str]:
    """The outcomes of the correct module."""
    imported = import_module(f"envs_contrib.terminal.packages.{module}")
    # Through JSON, as the arguments reach the sandbox; and so that no function can change another's.
    return [outcome(getattr(imported, name), json.loads(json.dumps(args))) for name, args in cases]


def _tests(package: str, module: str) -> str:
    """The visible tests, as a module of unittest."""
    lines = [
        "import unittest",
        "",
        f"from {package} import {module}",
        "",
        "",
        "class Tests(unittest.TestCase):",
    ]
    cases = VISIBLE[module]
    for number, (case, expected) in enumerate(zip(cases, outcomes(module, cases), strict=True), start=1):
        call = f"{module}.{case.function}({', '.join(map(repr, case.args))})"
        lines.append(f"    def test_{number}_{case.function}(self):")
        if expected.startswith("raises "):
            lines.append(f"        with self.assertRaises({expected.removeprefix('raises ')}):")
            lines.append(f"            {call}")
        else:
            lines.append(f"        self.assertEqual({call}, {expected})")
        lines.append("")
    return "\n".join(lines)
