"""docs/models.md and docs/megatron.md: their tables of families are those of code and tests."""

from __future__ import annotations

import re

from agentrl.trainer.megatron.model.families import FAMILIES
from tests.house.source import ROOT
from tests.trainer.families import FOLDED, PACKED
from tests.trainer.megatron.models import FAMILIES_OF_EXPERTS, LINEAR


def families_in(row: str) -> set[str]:
    guide = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (cell,) = re.findall(rf"^\| {row} \| (.*) \|$", guide, re.MULTILINE)
    return set(cell.split(", "))


def test_the_families_that_share_a_row_are_those_that_are_tested() -> None:
    assert families_in("share a row") == set(PACKED)


def test_the_others_are_those_that_are_tested() -> None:
    variants = {"gemma2_caps", "mistral_window", "phi3_longrope", "qwen2_window"}
    assert families_in("go in batches of like length") == set(FOLDED) - variants


def test_the_table_of_megatrons_families_says_what_each_of_them_has() -> None:
    guide = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes)? ?\| (yes)? ?\| (yes|no) \|$", guide, re.MULTILINE)
    assert {name for name, *_ in rows} == FAMILIES.keys()
    assert len(rows) == len(FAMILIES)
    assert {name for name, experts, _, _ in rows if experts} == set(FAMILIES_OF_EXPERTS)
    assert {name for name, _, ahead, _ in rows if ahead} == {n for n, f in FAMILIES.items() if f.ahead}
    assert {name for name, *_, saved in rows if saved == "no"} == set(LINEAR)
