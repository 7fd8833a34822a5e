"""The files of the project, and the syntax trees of its Python, for the tests of the project itself."""

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
PYTHON_FOLDERS = ("agentrl", "agentrl_simulate", "benchmarks", "envs_contrib", "examples", "tests")
TEXT_FOLDERS = (*PYTHON_FOLDERS, "docs", ".ci")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".html", ".css", ".js", ".svg", ".json", ".txt", ""}


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """Every Python file under some folders, or under all of them."""
    names = folders or PYTHON_FOLDERS
    return tuple(path for folder in names for path in sorted((ROOT / folder).rglob("*.py")))


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
    """A path relative to the root of the project."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=name_of(path))


def comments_of(path: Path) -> Iterator[str]:
    """The comments of a file, without strings that look like comments."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def requirements(*extras: str) -> tuple[Requirement, ...]:
    """The dependencies in pyproject.toml: those of the core, and those of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = [Requirement(line) for line in project["dependencies"]]
    optional: list[Requirement] = []
    pending = list(extras)
    for extra in pending:
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == project["name"]:
                pending += [name for name in sorted(requirement.extras) if name not in pending]
            else:
                optional.append(requirement)
    return (*core, *optional)
