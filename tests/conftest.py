"""One thread and Ctrl-C for every test process, hypothesis profiles, tiers, a summary of deselected tests."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence

# Before torch is imported: spinning threads of several processes slow each other down greatly.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import pytest
from hypothesis import HealthCheck, Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

from tests.slow import slow_tests

settings.register_profile(
    "quick",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=30,
)
# For a planted bug the smallest example is not needed, and shrinking takes most of the time.
settings.register_profile(
    "bugs", settings.get_profile("quick"), max_examples=100, phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("long", settings.get_profile("quick"), max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS", "quick"))

NUM_DESELECTED = pytest.StashKey[Counter[str]]()
MANUAL_TIERS = {"faults": "make test-faults", "learning": "make test-learning"}
"""Tiers of their own, run before a release; none of their tests is in any other tier."""
COMMANDS = {"gpu": "make test-full, on a machine with a GPU", **MANUAL_TIERS, "full": "make test-full"}
"""By tier, the command that runs it; a test with two of these marks belongs to the first."""
SHARED = ("tests/trainer/megatron/",)
"""Folders whose files share processes that take many seconds to start."""


class SharedScheduling(LoadFileScheduling):
    """Each file on one worker, and all files of a folder that shares processes on one."""

    def _split_scope(self, nodeid: str) -> str:
        shared = (folder for folder in SHARED if nodeid.startswith(folder))
        return next(shared, super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return SharedScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NUM_DESELECTED] = Counter()
    # Of this user's own files, tests touch none.
    state = tempfile.mkdtemp(prefix="agentrl-tests-")
    os.environ["XDG_STATE_HOME"] = state
    config.add_cleanup(lambda: shutil.rmtree(state, ignore_errors=True))
    # A process that was started in the background ignores Ctrl-C, and so would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A handler that a test leaves behind would interrupt later tests in another way."""
    yield
    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert handler is signal.default_int_handler, f"{item.nodeid} leaves a handler of SIGINT: {handler}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of manual tiers and slow ones are not quick: `not full` deselects them."""
    slow = slow_tests()
    for item in items:
        if item.nodeid in slow or any(item.get_closest_marker(mark) for mark in MANUAL_TIERS):
            item.add_marker("full")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        marks = [mark for mark in COMMANDS if item.get_closest_marker(mark)]
        item.config.stash[NUM_DESELECTED].update(marks[:1])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_deselected"] = dict(session.config.stash[NUM_DESELECTED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Every worker deselects the same tests."""
    if error is None:
        node.config.stash[NUM_DESELECTED] |= Counter(node.workeroutput["num_deselected"])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    num_deselected = terminalreporter.config.stash[NUM_DESELECTED]
    if not num_deselected:
        return
    terminalreporter.section("not run in this tier")
    for mark, count in sorted(num_deselected.items()):
        terminalreporter.write_line(f"{count} tests marked `{mark}`: {COMMANDS[mark]}")
    terminalreporter.write_line("planted bugs: make mutants; figures: make bench")
