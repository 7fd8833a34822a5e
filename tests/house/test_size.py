"""Files, functions and nesting stay small: the largest of them determine how a codebase reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.source import name_of, python_files, tree_of

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 50
MAX_NESTING = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef
# A `with` decides nothing: it is no control flow.
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def nesting(node: ast.AST, depth: int = 0) -> int:
    """How deep control flow goes inside `node`; an elif is as deep as its if, inner functions start anew."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            continue
        chained = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
        below = depth + (isinstance(child, BLOCKS) and not chained)
        deepest = max(deepest, nesting(child, below))
    return deepest


def in_all_functions() -> Iterator[tuple[Path, Function]]:
    return ((path, node) for path in python_files() for node in functions(tree_of(path)))


def test_files_are_shorter_than_500_lines() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    assert {name: n for name, n in lengths.items() if n >= MAX_FILE_LINES} == {}


def test_functions_are_shorter_than_50_lines() -> None:
    long = {
        f"{name_of(path)}:{node.lineno} {node.name}": lines
        for path, node in in_all_functions()
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) >= MAX_FUNCTION_LINES
    }
    assert long == {}


def test_control_flow_nests_at_most_three_deep() -> None:
    deep = {
        f"{name_of(path)}:{node.lineno} {node.name}": depth
        for path, node in in_all_functions()
        if (depth := nesting(node)) > MAX_NESTING
    }
    assert deep == {}


@pytest.mark.parametrize(
    ("source", "depth"),
    [
        ("x = 1", 0),
        ("if a:\n  pass\nelif b:\n  pass\nelse:\n  pass", 1),
        ("if a:\n  pass\nelse:\n  for b in c:\n    pass", 2),
        ("for a in b:\n  with c:\n    try:\n      pass\n    finally:\n      pass", 2),
        ("def f():\n  if a:\n    pass", 0),
    ],
)
def test_nesting_is_counted_as_a_reader_would(source: str, depth: int) -> None:
    assert nesting(ast.parse(source)) == depth
