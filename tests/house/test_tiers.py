"""The list of slow tests names tests that are there, and none of the code's own shape."""

from __future__ import annotations

import ast

from tests.house.source import ROOT, tree_of
from tests.slow import KEPT, slow_tests, too_slow


def test_every_slow_test_is_one() -> None:
    defined: dict[str, set[str]] = {}
    for id_ in sorted(slow_tests()):
        file, _, name = id_.partition("::")
        if file not in defined:
            nodes = ast.walk(tree_of(ROOT / file))
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
            defined[file] = {node.name for node in nodes if isinstance(node, kinds)}
        assert name.partition("[")[0] in defined[file], f"{id_} is gone; take it out of tests/slow.txt"
        assert not file.startswith(KEPT), id_


def test_a_file_keeps_its_fastest_test() -> None:
    seconds = {"a.py::x": 9.0, "a.py::y": 3.0, "b.py::x": 2.5, "b.py::y": 0.1, "c.py::x": 7.0}
    assert too_slow({**seconds, f"{KEPT}d.py::x": 9.0}) == {"a.py::x", "b.py::x", "c.py::x"}
