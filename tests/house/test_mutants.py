"""The table of planted bugs follows the code, and the harness tells apart what it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.mutants.__main__ import Fate, judge
from tests.mutants.table import Mutant, StaleMutantError, load, mutated

TEST = "from double_it import double\n\ndef test_double():\n    assert double(2) == 4\n"
ABORTED_IN_THE_END = "__import__('atexit').register(__import__('os').abort)"
MUTANT = Mutant("times three", "double_it.py", "2 * x", "3 * x", ("test_code.py",))


def test_names_are_unique_and_no_bug_is_harmless() -> None:
    mutants = load()
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    assert [mutant.name for mutant in mutants if mutant.old == mutant.new] == []


@pytest.mark.parametrize("mutant", load(), ids=lambda mutant: mutant.name)
def test_every_bug_can_be_planted(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    compile(mutated(mutant, source), mutant.file, "exec")
    assert all((ROOT / test.split("::")[0]).exists() for test in mutant.tests)


@pytest.mark.parametrize("source", ["", "2 * x + 2 * x"])
def test_a_snippet_must_stand_in_the_file_exactly_once(source: str) -> None:
    with pytest.raises(StaleMutantError, match="times three"):
        mutated(MUTANT, source)


@pytest.mark.parametrize(
    ("new", "fate"),
    [
        ("3 * x", Fate.KILLED),
        (f"{ABORTED_IN_THE_END} and 3 * x", Fate.KILLED),
        ("x + x", Fate.SURVIVED),
        (f"{ABORTED_IN_THE_END} and 2 * x", Fate.BROKEN),
        ("(", Fate.BROKEN),
    ],
)
def test_a_bug_is_killed_only_by_a_test_that_fails(tmp_path: Path, new: str, fate: Fate) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (tmp_path / "double_it.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_code.py").write_text(TEST)
    outcome = judge(Mutant("bug", "double_it.py", "2 * x", new, ("test_code.py",)), tmp_path)
    assert outcome.fate is fate
    assert "2 * x" in (tmp_path / "double_it.py").read_text()
