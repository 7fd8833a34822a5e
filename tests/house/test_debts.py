"""Debts are counted, and the count may only fall."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house.source import ROOT, comments_of, name_of, python_files, tree_of

SKIPS = {"skip", "skipif", "xfail", "importorskip"}
BROAD = {"Exception", "BaseException"}


def _identifier(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _nodes(path: Path, is_debt: Callable[[ast.AST], bool]) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if is_debt(node):
            yield f"{name_of(path)}:{getattr(node, 'lineno', 0)}"


def _comments(path: Path, pattern: str) -> Iterator[str]:
    return (f"{name_of(path)}: {comment}" for comment in comments_of(path) if re.search(pattern, comment))


def _is_broad(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(exception is None or _identifier(exception) in BROAD for exception in caught)


def _is_skip(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in SKIPS
        and _identifier(node.value) in {"pytest", "mark"}
    )


FINDERS: dict[str, Callable[[Path], Iterator[str]]] = {
    "any": lambda path: _nodes(path, lambda node: _identifier(node) == "Any"),
    "type_ignores": lambda path: _comments(path, r"type:\s*ignore"),
    "noqas": lambda path: _comments(path, r"noqa"),
    "broad_excepts": lambda path: _nodes(path, _is_broad),
    "skips": lambda path: _nodes(path, _is_skip),
}


def places_of(debt: str) -> list[str]:
    if debt == "import_exceptions":
        contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        return [exception for contract in contracts for exception in contract.get("ignore_imports", [])]
    return [place for path in python_files() for place in FINDERS[debt](path)]


@pytest.mark.parametrize("debt", [*FINDERS, "import_exceptions"])
def test_debts_only_fall(debt: str) -> None:
    allowed = tomllib.loads((Path(__file__).parent / "debts.toml").read_text())[debt]
    places = places_of(debt)
    listing = "\n  ".join(places)
    assert len(places) <= allowed, f"{len(places)} {debt}, {allowed} are allowed; do without:\n  {listing}"
    assert len(places) >= allowed, f"only {len(places)} {debt} are left: lower the number in debts.toml"


@pytest.mark.parametrize(
    ("debt", "source"),
    [
        ("any", "x: list[Any] = []"),
        ("type_ignores", "x = 1  # type: ignore[assignment]"),
        ("noqas", "x = 1  # noqa: E501"),
        ("broad_excepts", "try:\n    x\nexcept (ValueError, Exception):\n    y"),
        ("broad_excepts", "try:\n    x\nexcept:\n    y"),
        ("skips", "@pytest.mark.skipif(x)\ndef f(): ..."),
        ("skips", "pytest.importorskip('x')"),
    ],
)
def test_each_debt_is_detected(
    debt: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.house.source.ROOT", tmp_path)
    path = tmp_path / "code.py"
    path.write_text(source)
    assert len(list(FINDERS[debt](path))) == 1
