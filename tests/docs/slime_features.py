"""The rows of docs/slime-features.md; `make reference` writes their counts there and into the guide."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "slime-features.md"
GUIDE = ROOT / "docs" / "coming-from-slime.md"
STATES = ("works", "in part", "not here")
SENTENCE = re.compile(r"^Of \d+ things of slime.*$", re.MULTILINE)
_TABLE = re.compile(r"^## (In part, or not here|What works): (.*)\n\n.*\n.*\n((?:\|.*\n)+)", re.MULTILINE)


class Feature(NamedTuple):
    """A thing that users know: its names there, its state here, what does the same, and the tests of it.

    here: what does the same, or what is missing and what to do in its place; "the same" stands for the names
    there. tests: what fails if it breaks, a file of tests or one of its tests.
    """

    name: str
    slime: str
    state: str
    here: str
    tests: list[str]


def features() -> dict[str, list[Feature]]:
    """Those of slime, and those of miles and the field: the rows of the page."""
    found: dict[str, list[Feature]] = {}
    for kind, of, rows in _TABLE.findall(PAGE.read_text(encoding="utf-8")):
        for line in rows.splitlines():
            name, there, *state, here, tests = (cell.strip() for cell in line.split("|")[1:-1])
            assert len(state) == (kind != "What works"), line
            feature = Feature(name, there, *(state or ["works"]), here, re.findall(r"`([^`]+)`", tests))
            found.setdefault(of, []).append(feature)
    return found


def sentence() -> str:
    """How many there are in each state."""
    slime, miles = (_counts(found) for found in features().values())
    return (
        f"Of {sum(slime)} things of slime that its users know, {slime[0]} work, {slime[1]} are here in part, "
        f"and {slime[2]} are not; of {sum(miles)} of miles and the field {miles[0]} work, {miles[1]} are "
        f"here in part, and {miles[2]} are not."
    )


def _counts(found: list[Feature]) -> list[int]:
    of_state = Counter(feature.state for feature in found)
    return [of_state[state] for state in STATES]


def write() -> None:
    """Write the counts into both pages."""
    for page in (PAGE, GUIDE):
        page.write_text(
            SENTENCE.sub(lambda _: sentence(), page.read_text(encoding="utf-8")), encoding="utf-8"
        )
