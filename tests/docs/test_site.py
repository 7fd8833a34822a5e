"""The site of the documentation: no dead link, nothing that is loaded from elsewhere, and all pages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.blocks import ROOT

PARTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md", "docs", "examples", "skills", "agentrl")


class Links(HTMLParser):
    """What a page links to (`targets`) and loads (`loaded`), and where in it a link may lead to (`ids`)."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.ids |= {of["id"]} if "id" in of else set()
        if tag == "a" and "href" in of:
            self.targets.append(of["href"])
        elif tag in {"script", "img", "iframe", "source"} and "src" in of:
            self.loaded.append(of["src"])
        elif tag == "link" and of.get("rel") in {"stylesheet", "icon", "preload"}:
            self.loaded.append(of["href"])


def built(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", source / "docs"]
    return subprocess.run(
        [*command, "-d", site.parent / "doctrees", source, site], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "html"
    done = built(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = {page: Links(page) for page in site.rglob("*.html")}
    assert len(pages) > 70
    for page, links in pages.items():
        assert [name for name in links.loaded if urlsplit(name).netloc] == [], page
        for target in (*links.targets, *links.loaded):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert there.is_file(), f"{page}: {target}"
            if parts.fragment and there in pages:
                assert unquote(parts.fragment) in pages[there].ids, f"{page}: {target}"


def test_programs_find_the_markdown_of_every_page(site: Path) -> None:
    listed = re.findall(
        r"^- \[.+?\]\((.+?)\): \S", (site / "llms.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(listed) == len(set(listed))
    assert {*listed, "README.md"} == {
        page.relative_to(ROOT).as_posix()
        for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md", "skills/*/SKILL.md")
        for page in ROOT.glob(pattern)
    }
    for name in listed:
        assert (site / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_readme_names_every_guide() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [guide.name for guide in ROOT.glob("docs/*.md") if f"(docs/{guide.name})" not in readme] == []


@pytest.mark.full
@pytest.mark.parametrize("link", ["[there](no-such-page.md)", "[there](tools.md#no-such-part)"])
def test_a_dead_link_fails_the_build_by_its_name(link: str, tmp_path: Path) -> None:
    source = tmp_path / "copy"
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
        source.mkdir(exist_ok=True)
        copy(ROOT / part, source / part)
    with (source / "docs" / "graders.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{link}\n")
    done = built(source, tmp_path / "html")
    assert done.returncode == 1
    assert "no-such-pa" in done.stderr
