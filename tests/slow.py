"""The tests that are too slow for the quick tier: their ids, and the rule by which they were chosen.

    make test ARGS=--junit-xml=times.xml
    python -m tests.slow times.xml

adds what took more than a second and a half. A file keeps its fastest test in the quick tier, unless that
takes more than six seconds itself; the tests of the code's own shape all stay.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).with_suffix(".txt")
MOST_S, MOST_OF_ONLY_S = 1.5, 6.0
KEPT = "tests/house/"


def slow_tests() -> frozenset[str]:
    """The ids of the tests that only `make test-full` runs since they are slow."""
    return frozenset(LIST.read_text("utf-8").splitlines())


def too_slow(seconds: Mapping[str, float]) -> set[str]:
    """The ids that leave the quick tier. seconds: of all of its tests."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for id_ in seconds:
        if not id_.startswith(KEPT):
            by_file[id_.partition("::")[0]].append(id_)
    found: set[str] = set()
    for ids in by_file.values():
        slow = {id_ for id_ in ids if seconds[id_] >= MOST_S}
        fastest = min(ids, key=seconds.__getitem__)
        found |= slow - ({fastest} if seconds[fastest] <= MOST_OF_ONLY_S else set())
    return found


def read_times(path: Path) -> dict[str, float]:
    """The seconds of each test with its fixtures, from pytest's JUnit file."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/")
        seconds[f"{file}.py::{case.get('name')}"] += float(case.get("time", 0.0))
    return seconds


def write(ids: Iterable[str]) -> None:
    """Write the list."""
    LIST.write_text("".join(f"{id_}\n" for id_ in sorted(ids)), "utf-8")


if __name__ == "__main__":
    write(slow_tests() | too_slow(read_times(Path(sys.argv[1]))))
