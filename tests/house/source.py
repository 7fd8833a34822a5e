"""What the tests about the project itself look at: its files, and its Python as syntax trees."""

from __future__ import annotations

import ast
import io
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYTHON_FOLDERS = ("agentrl", "benchmarks", "envs_contrib", "examples", "tests")
TEXT_FOLDERS = (*PYTHON_FOLDERS, "docs", ".ci")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".html", ".css", ".js", ".svg", ".json", ".txt", ""}


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """Every Python file under some folders, or under all of them."""
    chosen = folders or PYTHON_FOLDERS
    return tuple(path for folder in chosen for path in sorted((ROOT / folder).rglob("*.py")))


@cache
def text_files() -> tuple[Path, ...]:
    """Every text file that is part of the project."""
    inside = [path for folder in TEXT_FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    # In a worktree `.git` is a file, and holds a path of the machine.
    top = sorted(path for path in ROOT.glob("*") if path.name != ".git")
    return tuple(
        path
        for path in [*top, *inside]
        if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts
    )


def name_of(path: Path) -> str:
    """A path as a person writes it: from the root of the project."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


def comments_of(path: Path) -> Iterator[str]:
    """The comments of a file, and nothing that merely looks like one inside a string."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def requirements(*extras: str) -> tuple[Requirement, ...]:
    """What pyproject.toml asks for: the core's dependencies, and those of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = [Requirement(line) for line in project["dependencies"]]
    chosen: list[Requirement] = []
    waiting = list(extras)
    for extra in waiting:
        for one in map(Requirement, project["optional-dependencies"][extra]):
            if one.name == project["name"]:
                waiting += [name for name in sorted(one.extras) if name not in waiting]
            else:
                chosen.append(one)
    return (*core, *chosen)
