"""Find the place of a bug in the package and plant it there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.patterns import Match
from tests.mutants.table import Bug

PACKAGES = ("agentrl", "agentrl_simulate", "envs_contrib", "benchmarks")
# Statements that contain definitions and add nothing to their qualified names.
BLOCKS = (ast.If, ast.Try, ast.With, ast.AsyncWith, ast.For)


class StaleBugError(Exception):
    """A bug's definition or pattern is not in the package exactly once: its entry must be updated."""


class Definition(NamedTuple):
    """A definition: the path of its file below the root, the syntax tree of that file, and its own."""

    path: str
    module: ast.Module
    node: ast.AST


Index = Mapping[str, Sequence[Definition]]


def _definitions(parent: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function, class and constant below `parent`, with its qualified name."""
    for node in ast.iter_child_nodes(parent):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield f"{prefix}{name}", node
                yield from _definitions(node, f"{prefix}{name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{prefix}{name}", node
        if isinstance(node, BLOCKS):
            yield from _definitions(node, prefix)


def index_of(root: Path, paths: Sequence[str] = ()) -> Index:
    """Every definition in some files, or in all of the package, by its qualified name."""
    all_files = (file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))
    index: dict[str, list[Definition]] = {}
    for path in paths or [file.relative_to(root).as_posix() for file in all_files]:
        module = ast.parse((root / path).read_text(encoding="utf-8"), path)
        for name, node in _definitions(module):
            index.setdefault(name, []).append(Definition(path, module, node))
    return index


def find(bug: Bug, index: Index) -> tuple[Definition, Match]:
    """The one place that a bug can go to.

    Raises:
        StaleBugError: there is no such definition, or its pattern does not match in it exactly once.
    """
    places = [place for place in index.get(bug.where, ()) if bug.path in place.path]
    if not places:
        where = f" in a path with {bug.path!r}" if bug.path else ""
        raise StaleBugError(f"{bug.name}: nothing is called {bug.where}{where}")
    matches = [(place, match) for place in places for match in bug.replacement.matches(place.node)]
    if len(matches) != 1:
        files = ", ".join(sorted({place.path for place in places}))
        raise StaleBugError(
            f"{bug.name}: the old pattern matches {len(matches)} times in {bug.where} ({files})"
        )
    return matches[0]


def mutated(bug: Bug, index: Index, root: Path) -> tuple[Path, str]:
    """The file of a bug below `root`, and its text with the bug.

    Raises:
        StaleBugError: see `find`.
    """
    path = find(bug, index)[0].path
    place, match = find(bug, index_of(root, [path]))  # a new tree: it is modified
    bug.replacement.apply(match)
    return root / path, ast.unparse(ast.fix_missing_locations(place.module)) + "\n"
