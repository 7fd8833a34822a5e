"""docs/models.md: its table of families is that of the tests."""

from __future__ import annotations

import re

from tests.house.source import ROOT
from tests.trainer.families import FOLDED, PACKED


def families_in(row: str) -> set[str]:
    guide = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (cell,) = re.findall(rf"^\| {row} \| (.*) \|$", guide, re.MULTILINE)
    return set(cell.split(", "))


def test_the_families_that_share_a_row_are_those_that_are_tested() -> None:
    assert families_in("share a row") == set(PACKED)


def test_the_others_are_those_that_are_tested() -> None:
    variants = {"gemma2_caps", "mistral_window", "phi3_longrope", "qwen2_window"}
    assert families_in("go in batches of like length") == set(FOLDED) - variants
