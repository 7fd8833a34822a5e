"""Links between pages lead to existing files, and to existing headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of the headings: lower case, dashes for blanks, no punctuation."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page):
    assert dead_links(page) == []


def test_dead_links_are_detected(tmp_path):
    (tmp_path / "other.md").write_text("# What it's for\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#what-its-for) [b](other.md#gone) [c](gone.md) [d](#gone)\n```\n[e](x.md)\n```\n"
    )
    assert dead_links(page) == ["other.md#gone", "gone.md", "#gone"]
