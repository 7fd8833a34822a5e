"""Published text contains no private paths, no foreign hosts and no unfinished work."""

from __future__ import annotations

import re

import pytest

from tests.house.source import name_of, text_files

# The licence and the public documents that a formula or a format may be cited from.
ALLOWED_HOSTS = {"www.apache.org", "arxiv.org", "json-schema.org", "www.w3.org", "localhost", "127.0.0.1"}
PRIVATE_PATH = re.compile(r"(?<![\w.])/(?:root|home|work|opt|Users|mnt)/\w+")
HOST = re.compile(r"\bhttps?://([\w.-]+)")
REGISTRY = re.compile(r"\b(?:py[p]i|anacond[a]|npmj[s]|pythonhoste[d])\.\w+|download\.pytorch", re.IGNORECASE)
UNFINISHED = re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X]|HAC[K])\b")


def findings(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name_of(path)}:{number}: {match.group()}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in pattern.finditer(line)
    ]


@pytest.mark.parametrize(
    "pattern", [PRIVATE_PATH, REGISTRY, UNFINISHED], ids=["path", "registry", "unfinished"]
)
def test_no_text_holds(pattern: re.Pattern[str]) -> None:
    assert findings(pattern) == []


def test_every_host_is_allowed() -> None:
    foreign = [finding for finding in findings(HOST) if HOST.search(finding)[1] not in ALLOWED_HOSTS]
    assert foreign == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (PRIVATE_PATH, "see " + "/".join(["", "home", "me", "file"])),
        (REGISTRY, "from " + ".".join(["pypi", "org"])),
        (UNFINISHED, "# " + "TO" + "DO: later"),
        (HOST, "https:" + "//somewhere.example/x"),
    ],
)
def test_each_pattern_sees_what_it_is_for(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)
