"""One thread for every test process, hypothesis profiles, tiers, and a word on what a tier left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

# Before torch is imported: spinning threads of several processes slow each other down many times.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "quick",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=30,
)
# Of a planted bug nobody needs the smallest example, and most of the time goes into making it small.
settings.register_profile(
    "bugs", settings.get_profile("quick"), max_examples=100, phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("long", settings.get_profile("quick"), max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS", "quick"))

LEFT_OUT = pytest.StashKey[Counter[str]]()
BY_HAND = {"faults": "make test-faults", "learning": "make test-learning"}
"""Tiers of their own, run before a release; none of their tests is in any other tier."""
HOW = {"gpu": "make test-full, on a machine with a GPU", **BY_HAND, "full": "make test-full"}
"""By tier, the command that runs it; a test with two of these marks belongs to the first."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is run by hand is not quick: `not full` leaves it out."""
    for item in items:
        if any(item.get_closest_marker(mark) for mark in BY_HAND):
            item.add_marker("full")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        marks = [mark for mark in HOW if item.get_closest_marker(mark)]
        item.config.stash[LEFT_OUT].update(marks[:1])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Every worker leaves out the same tests."""
    if error is None:
        node.config.stash[LEFT_OUT] |= Counter(node.workeroutput["left_out"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = terminalreporter.config.stash[LEFT_OUT]
    if not left_out:
        return
    terminalreporter.section("not run in this tier")
    for mark, count in sorted(left_out.items()):
        terminalreporter.write_line(f"{count} tests marked `{mark}`: {HOW[mark]}")
    terminalreporter.write_line("planted bugs: make mutants; figures: make bench")
