"""The tables of planted bugs match the code, and the harness classifies outcomes correctly."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.mutants.__main__ import Fate, judge
from tests.mutants.patterns import Pattern, Replacement
from tests.mutants.planting import Index, StaleBugError, index_of, mutated
from tests.mutants.table import MAX_BUGS, Bug, load, targets

LAW = re.compile(r"^\| (.+?) \| .+ \|$", re.MULTILINE)
CODE = "FACTOR = 2\n\ndef double(x):\n    # twice\n    return FACTOR * x\n"
TEST = "from double_it import double\n\ndef test_double():\n    assert double(2) == 4\n"
ABORTED_IN_THE_END = "__import__('atexit').register(__import__('os').abort)"


def stale(bug: Bug, index: Index) -> str | None:
    """The error of a bug in one line, or None."""
    for test in bug.tests:
        path, _, name = test.partition("::")
        file = ROOT / path
        if not file.exists():
            return f"{bug.name}: there is no {path}"
        if name and f"def {name.split('[')[0]}(" not in file.read_text(encoding="utf-8"):
            return f"{bug.name}: there is no {name} in {path}"
    try:
        path, text = mutated(bug, index, ROOT)
        compile(text, path, "exec")
    except (StaleBugError, SyntaxError) as error:
        return f"{bug.name}: {error}" if isinstance(error, SyntaxError) else str(error)
    return None if bug.replacement.changes else f"{bug.name}: old and new are the same"


def test_every_bug_can_be_planted_and_has_its_tests() -> None:
    index = index_of(ROOT)
    lines = [line for bug in load() if (line := stale(bug, index)) is not None]
    assert not lines, "stale bugs:\n" + "\n".join(lines)


def test_bugs_are_few_and_each_has_a_name_of_its_own() -> None:
    names = Counter(bug.name for bug in load())
    assert [name for name, times in names.items() if times > 1] == []
    assert len(names) <= MAX_BUGS


def test_every_law_of_the_architecture_has_a_bug_or_two() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("\n## Laws")[2].partition("\n## ")[0]
    laws = [law for law in LAW.findall(table) if law not in ("law", "---")]
    bugs = Counter(bug.target for bug in load())
    assert [law for law in laws if bugs[law] not in (1, 2)] == [], "laws without a bug, or with three"
    assert [law for law in targets("law") if law not in laws] == [], "bugs of laws that do not exist"


@pytest.mark.parametrize(
    ("old", "new", "code", "mutant"),
    [
        ("a < b", "a <= b", "x = (a <  b)", "x = a <= b"),
        ("f(any_x, 'k')", "any_x", 'y = f(g(1),\n      "k")', "y = g(1)"),
        ("any_x - any_x", "0", "y = (a - b) + (a - a)", "y = a - b + 0"),
        ("any_x.a * k", "any_x.b", "y = (p + q).a * k", "y = (p + q).b"),
        ("f(1, *any_rest, k=2, **any_others)", "f(*any_rest)", "f(1, 3, 4, j=1, k=2)", "f(3, 4)"),
        ("f(*any_rest, **any_others)", "g(0, *any_rest, **any_others)", "f(1, j=2)", "g(0, 1, j=2)"),
        ("seed=any_s", "seed=any_s + 1", "f(x, seed=s.seed)", "f(x, seed=s.seed + 1)"),
        ("seed = any_s", "seed = 0", "seed = 3", "seed = 0"),
        ("await close()", "...", "async def f():\n    await close()", "async def f():\n    ..."),
        ("a()\nb()", "b()", "if x:\n    a()\n    b()\n    c()", "if x:\n    b()\n    c()"),
        ("name", "0", "f'{name}'", "f'{0}'"),
    ],
)
def test_a_pattern_finds_what_it_describes(old: str, new: str, code: str, mutant: str) -> None:
    tree, replacement = ast.parse(code), Replacement(Pattern.of(old), Pattern.of(new))
    (match,) = replacement.matches(tree)
    replacement.apply(match)
    assert ast.unparse(tree) == ast.unparse(ast.parse(mutant))


@pytest.mark.parametrize(
    "code", ["y = b < a", "a < b < c", "x = a\ny = b", "f(k=1, j=2)", "seeds = 1", "f(seed)"]
)
@pytest.mark.parametrize("old", ["a < b", "f(k=1)", "seed=any_x", "x = a; z = b"])
def test_a_pattern_finds_nothing_else(old: str, code: str) -> None:
    assert Replacement(Pattern.of(old), Pattern.of("0")).matches(ast.parse(code)) == []


@pytest.mark.parametrize(
    ("where", "path", "old", "reason"),
    [
        ("triple", "", "x", "times three: nothing is called triple"),
        ("double", "elsewhere", "x", "times three: nothing is called double in a path with 'elsewhere'"),
        ("double", "", "4 * x", "times three: the old pattern matches 0 times in double (double_it.py)"),
        ("double", "", "any_x", "times three: the old pattern matches 3 times in double (double_it.py)"),
    ],
)
def test_a_bug_without_a_unique_place_is_stale(
    tmp_path: Path, where: str, path: str, old: str, reason: str
) -> None:
    (tmp_path / "double_it.py").write_text(CODE)
    bug = Bug("a law", "times three", where, old, "3 * x", ("test_code.py",), path)
    outcome = judge(bug, index_of(tmp_path, ["double_it.py"]), tmp_path)
    assert outcome[1:3] == (Fate.STALE, reason)


@pytest.mark.parametrize(
    ("where", "old", "new", "fate"),
    [
        ("double", "FACTOR * x", "3 * x", Fate.KILLED),
        ("double", "FACTOR * x", f"{ABORTED_IN_THE_END} and 3 * x", Fate.KILLED),
        ("double", "FACTOR * x", "x + x", Fate.SURVIVED),
        ("double", "FACTOR * x", f"{ABORTED_IN_THE_END} and 2 * x", Fate.BROKEN),
        ("FACTOR", "2", "missing", Fate.BROKEN),
    ],
)
def test_a_bug_is_killed_only_by_a_test_that_fails(
    tmp_path: Path, where: str, old: str, new: str, fate: Fate
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n    full: long\n")
    (tmp_path / "double_it.py").write_text(CODE)
    (tmp_path / "test_code.py").write_text(TEST)
    bug = Bug("a law", "bug", where, old, new, ("test_code.py",))
    assert judge(bug, index_of(tmp_path, ["double_it.py"]), tmp_path).fate is fate
    assert (tmp_path / "double_it.py").read_text() == CODE
