"""Plant every bug of the tables, one at a time, and require that its tests fail.

    python -m tests.mutants [--json] [--jobs 2] [NAME ...]

Exits with 1 when a bug survives, when its function or pattern is no longer in the code exactly once, or
when its tests are not green without it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.mutants.planting import PACKAGES, Index, StaleBugError, index_of, mutated
from tests.mutants.table import ROOT, Bug, load

COPIED = (*PACKAGES, "examples", "tests", "docs", "pyproject.toml", "README.md", "Makefile")
TIMEOUT_S = 300.0
# Native tracebacks: those of pytest parse the code, which may crash Python 3.11 on planted bugs.
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "--tb=native", "-p", "no:cacheprovider")


class Fate(StrEnum):
    """The outcome of a bug. `slow` does not count as killed: a hanging test names no cause."""

    KILLED = "killed"
    SURVIVED = "survived"
    SLOW = "slow"
    STALE = "stale"
    BROKEN = "broken"


class Outcome(NamedTuple):
    """One bug, its fate, the test that failed (or the error), and the duration."""

    name: str
    fate: Fate
    detail: str
    seconds: float

    @property
    def is_killed(self) -> bool:
        """Whether a test detected the bug."""
        return self.fate is Fate.KILLED


def copy_tree(root: Path, target: Path) -> Path:
    """Copy the files that tests need, without byte code: an older .pyc file must not hide a bug."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
        elif source.exists():
            shutil.copy(source, target / name)
    return target


def _is_named(test: str) -> bool:
    """Whether it is one test, not a file."""
    return "::" in test


def run_tests(
    tree: Path, tests: Sequence[str], *, timeout_s: float | None = None, jobs: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run some tests of `tree` against the code of `tree`, not against the installed package.

    Of a file those of the quick tier; a test that is named runs whatever its tier.

    jobs: files at a time; 0 = one, in this order.

    Raises:
        subprocess.TimeoutExpired: they took longer than `timeout_s`.
    """
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS": "bugs"}
    marks = "not gpu" if all(_is_named(test) for test in tests) else "not gpu and not full"
    command = [*PYTEST, "-m", marks, "-n", str(jobs), "--dist", "loadfile", *tests]
    return subprocess.run(
        command, cwd=tree, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def all_green(tree: Path, bugs: Sequence[Bug], jobs: int) -> bool:
    """Whether the tests of these bugs pass without the bugs."""
    tests = {test for bug in bugs for test in bug.tests}
    named = {test for test in tests if _is_named(test)}
    for chosen in (tests - named, named):
        run = run_tests(tree, sorted(chosen), jobs=jobs) if chosen else None
        if run is not None and run.returncode:
            print(run.stdout, run.stderr, file=sys.stderr)
            return False
    return True


def last_line(output: str, start: str = "") -> str:
    """The last line that begins with `start`, or an empty string."""
    return next((line for line in reversed(output.splitlines()) if line.startswith(start) and line), "")


def fate_of(run: subprocess.CompletedProcess[str]) -> tuple[Fate, str]:
    """Read pytest's exit code: 1 = a test failed; 2 and up = the bug did not even import.

    Below 0: a leftover thread of the bug aborted the process, possibly after a test had failed.
    """
    failed = last_line(run.stdout, "FAILED").removeprefix("FAILED ").split(" - ")[0]
    if run.returncode == 0:
        return Fate.SURVIVED, last_line(run.stdout)
    if run.returncode == 1 or (run.returncode < 0 and failed):
        return Fate.KILLED, failed
    return Fate.BROKEN, last_line(run.stdout) or last_line(run.stderr)


@contextmanager
def planted(bug: Bug, index: Index, tree: Path) -> Iterator[None]:
    """Plant the bug in `tree` during the block."""
    path, broken = mutated(bug, index, tree)
    original = path.read_text(encoding="utf-8")
    path.write_text(broken, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(original, encoding="utf-8")


def judge(bug: Bug, index: Index, tree: Path) -> Outcome:
    """Plant one bug and run its tests."""
    started = time.monotonic()
    try:
        with planted(bug, index, tree):
            fate, detail = fate_of(run_tests(tree, bug.tests, timeout_s=TIMEOUT_S))
    except StaleBugError as error:
        fate, detail = Fate.STALE, str(error)
    except subprocess.TimeoutExpired:
        fate, detail = Fate.SLOW, f"no answer within {TIMEOUT_S:g} s"
    return Outcome(bug.name, fate, detail, time.monotonic() - started)


def judge_all(bugs: Sequence[Bug], sound: Path, folder: Path, jobs: int) -> list[Outcome]:
    """Judge every bug, `jobs` at a time, each worker in a copy of its own of `sound`, made in `folder`."""
    copies: SimpleQueue[Path] = SimpleQueue()
    for job in range(jobs):
        copies.put(copy_tree(sound, folder / str(job)))
    index = index_of(sound)

    def in_a_copy(bug: Bug) -> Outcome:
        tree = copies.get()
        try:
            outcome = judge(bug, index, tree)
        finally:
            copies.put(tree)
        print(f"{outcome.fate:9}{outcome.seconds:6.1f} s  {outcome.name}: {outcome.detail}", file=sys.stderr)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(in_a_copy, bugs))


def main() -> int:
    """Judge the bugs named on the command line, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these bugs")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    options = parser.parse_args()
    # Started in the background, this process and all tests would ignore Ctrl-C, and bugs there would survive.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    by_name = {bug.name: bug for bug in load()}
    if unknown := set(options.names) - set(by_name):
        parser.error(f"no bug is called {', '.join(sorted(unknown))}")
    chosen = [by_name[name] for name in options.names or by_name]

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        # The project may change meanwhile: the bugs are planted in the copy whose tests passed.
        sound = copy_tree(ROOT, Path(folder) / "sound")
        if not all_green(sound, chosen, options.jobs):
            print("The tests are not green without any bug; mend that first.", file=sys.stderr)
            return 1
        print(f"green without any bug: {time.monotonic() - started:.0f} s", file=sys.stderr)
        outcomes = judge_all(chosen, sound, Path(folder), options.jobs)

    survivors = [outcome for outcome in outcomes if not outcome.is_killed]
    if options.json:
        print(json.dumps([outcome._asdict() for outcome in outcomes], indent=2))
    # In the format of test runners: a killed bug counts as a passed test.
    print(f"{len(outcomes) - len(survivors)} passed, {len(survivors)} failed", file=sys.stderr)
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
