"""The shape of the package: what a newcomer has to hold in mind, as lists of places.

`python -m tests.house.shape` prints the numbers, `python -m tests.house.shape MEASURE` the places of one.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.house.source import ROOT, name_of, python_files, tree_of

PACKAGE = "agentrl"
MAX_CLASS_LINES = 200
MAX_PUBLIC_METHODS = 15
MAX_FOLDER_FILES = 16
SMALL_LINES = 100
# Written by `make reference`: one line a setting.
GENERATED = {"agentrl/assembly/keywords.py"}


def _sources() -> tuple[Path, ...]:
    return tuple(path for path in python_files(PACKAGE) if name_of(path) not in GENERATED)


def _classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    return (
        (path, node) for path in _sources() for node in tree_of(path).body if isinstance(node, ast.ClassDef)
    )


def _place(path: Path, node: ast.AST) -> str:
    return f"{name_of(path)}:{getattr(node, 'lineno', 0)}"


def top_entries() -> list[str]:
    """Modules and folders directly in the package."""
    entries = (ROOT / PACKAGE).iterdir()
    return sorted(
        e.name for e in entries if not e.name.startswith(("_", ".")) and (e.is_dir() or e.suffix == ".py")
    )


def long_classes() -> list[str]:
    """Classes of more than 200 lines."""
    found = (
        ((node.end_lineno or node.lineno) - node.lineno + 1, _place(path, node), node.name)
        for path, node in _classes()
    )
    return [f"{place} {name}: {lines}" for lines, place, name in found if lines > MAX_CLASS_LINES]


def wide_classes() -> list[str]:
    """Classes with more than 15 public methods and properties."""
    found = ((len(_public_methods(node)), _place(path, node), node.name) for path, node in _classes())
    return [f"{place} {name}: {methods}" for methods, place, name in found if methods > MAX_PUBLIC_METHODS]


def _public_methods(node: ast.ClassDef) -> set[str]:
    functions = (inner for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if not function.name.startswith("_")}


def ambiguous_names() -> list[str]:
    """Names of classes that mean two things; those with an underscore are private to their module."""
    named: dict[str, list[str]] = defaultdict(list)
    for path, node in _classes():
        if not node.name.startswith("_"):
            named[node.name].append(_place(path, node))
    return [f"{name}: {', '.join(places)}" for name, places in sorted(named.items()) if len(places) > 1]


def full_folders() -> list[str]:
    """Folders of more than 16 modules."""
    counts = Counter(path.parent for path in _sources() if path.name != "__init__.py")
    return [f"{name_of(folder)}: {n}" for folder, n in sorted(counts.items()) if n > MAX_FOLDER_FILES]


def casts() -> list[str]:
    """Calls of typing.cast."""
    return [
        _place(path, node)
        for path in _sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast"
    ]


def named_settings() -> list[str]:
    """String literals outside the sections that name a setting; compounds only: a word may be anything."""
    from agentrl.assembly.config import RunConfig, SftConfig
    from agentrl.config import leaves
    from agentrl.evaluation.config import EvalConfig

    names = {name for config in (RunConfig, SftConfig, EvalConfig) for name in leaves(config) if "_" in name}
    return [
        f"{_place(path, node)} {node.value}"
        for path in _sources()
        if path.name != "config.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and node.value in names
    ]


@cache
def _imports() -> dict[str, set[str]]:
    """Which modules of the package each one imports, at any place of its code; those for types left out."""
    modules = {_module(path): path for path in python_files(PACKAGE)}
    return {module: set(_imported(path, modules)) - {module} for module, path in modules.items()}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    hidden = {
        id(inner)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [_home(node.module, alias.name, modules) for alias in node.names]
        if id(node) not in hidden:
            yield from (name for name in names if name in modules)


def _home(module: str, name: str, modules: dict[str, Path]) -> str:
    """The module that `from module import name` reads, also where a package has taken the name from one."""
    inner = f"{module}.{name}"
    if inner in modules or module not in modules:
        return inner if inner in modules else module
    is_package = modules[module].name == "__init__.py"
    for node in tree_of(modules[module]).body if is_package else ():
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return node.module if node.module in modules else module
    return module


def circles() -> list[str]:
    """Circles of modules, imports inside functions counted: each once, by one way around it."""
    graph = {module: set(targets) for module, targets in _imports().items()}
    found: list[str] = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle = error.args[1]
            found.append(" <- ".join(cycle))
            graph[cycle[1]].discard(cycle[0])
        else:
            return found


def doors() -> list[str]:
    """Modules under 100 lines that one module alone imports.

    Whoever imports a name that a package takes from a module imports that module; the package does not.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for module, targets in _imports().items():
        for target in targets:
            if not target.startswith(f"{module}."):
                importers[target].add(module)
    return [
        f"{name_of(path)} <- {min(importers[module])}"
        for path in _sources()
        if len(importers[module := _module(path)]) == 1
        if len(path.read_text(encoding="utf-8").splitlines()) < SMALL_LINES
    ]


MEASURES: dict[str, Callable[[], list[str]]] = {
    measure.__name__: measure
    for measure in (
        top_entries,
        long_classes,
        wide_classes,
        ambiguous_names,
        full_folders,
        casts,
        named_settings,
        circles,
        doors,
    )
}

if __name__ == "__main__":
    for asked in sys.argv[1:]:
        print(*MEASURES[asked](), sep="\n")
    if not sys.argv[1:]:
        print(*(f"{name} = {len(measure())}" for name, measure in MEASURES.items()), sep="\n")
