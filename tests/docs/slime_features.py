"""docs/slime-features.md and the counts in the guide: `make reference` writes them of slime_features.toml."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tests.docs.blocks import ROOT

FILE = ROOT / "tests" / "docs" / "slime_features.toml"
PAGE = ROOT / "docs" / "slime-features.md"
GUIDE = ROOT / "docs" / "coming-from-slime.md"
STATES = ("works", "in part", "not here")
SENTENCE = re.compile(r"^Of \d+ things of slime.*$", re.MULTILINE)
_INTRODUCTION = """\
# What of slime is here

{sentence}

A thing is what a user sets, calls or looks at; flags that do one thing together are one. "The same" are
the names in the second column. What works has a test that fails if it breaks, and so has the part that
is here of what is in part. [Coming from slime](coming-from-slime.md) shows how to bring a run along.
"""


class Feature(NamedTuple):
    """A thing that users know: its names there, its state here, what does the same, and the tests of it."""

    name: str
    slime: str
    state: str
    here: str
    tests: Sequence[str]


def features() -> dict[str, list[Feature]]:
    """Those of slime, and those of miles and the field."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {table: [_feature(**entry) for entry in entries] for table, entries in tables.items()}


def _feature(*, test: str | Sequence[str] = (), **entry: str) -> Feature:
    return Feature(**entry, tests=[test] if isinstance(test, str) else test)


def sentence() -> str:
    """How many there are in each state."""
    slime, miles = (_counts(found) for found in features().values())
    return (
        f"Of {sum(slime)} things of slime that its users know, {slime[0]} work, {slime[1]} are here in part, "
        f"and {slime[2]} are not; of {sum(miles)} of miles and the field {miles[0]} work, {miles[1]} are "
        f"here in part, and {miles[2]} are not."
    )


def _counts(found: Sequence[Feature]) -> list[int]:
    of_state = Counter(feature.state for feature in found)
    return [of_state[state] for state in STATES]


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION.format(sentence=sentence())]
    for title, found in zip(("slime", "miles and the field"), features().values(), strict=True):
        missing = sorted((f for f in found if f.state != "works"), key=lambda f: STATES.index(f.state))
        rows = [(f.name, f.slime, f.state, f.here) for f in missing]
        parts += [f"## In part, or not here: {title}\n", _table(("thing", "names there", "", "here"), rows)]
    for title, found in zip(("slime", "miles and the field"), features().values(), strict=True):
        rows = [
            (f.name, f.slime, f.here, ", ".join(f"`{test}`" for test in f.tests))
            for f in found
            if f.state == "works"
        ]
        parts += [f"## What works: {title}\n", _table(("thing", "names there", "here", "test"), rows)]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


def write() -> None:
    """Write the page, and the counts into the guide."""
    PAGE.write_text(page(), encoding="utf-8")
    guide = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(SENTENCE.sub(lambda _: sentence(), guide), encoding="utf-8")
