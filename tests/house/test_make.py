"""The make targets, and the one entry point of continuous integration."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.house.source import ROOT, requirements

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = (
    *("help", "install", "sglang-cpu", "quickstart", "test", "lint", "test-sglang", "test-full"),
    *("test-faults", "test-learning", "mutants", "reference", "docs", "bench", "clean"),
)


def make(*arguments: str) -> str:
    # Inside `make test` this would be a sub-make, which prints the folders that it enters and leaves.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_help_is_the_default_and_lists_every_target() -> None:
    assert make() == make("help")
    listed = {line.split()[1] for line in make().splitlines()}
    assert listed == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_expands(target: str) -> None:
    assert make("--dry-run", target)


@pytest.mark.parametrize(
    "target", ["test", "test-sglang", "test-full", "test-faults", "test-learning", "mutants"]
)
def test_tests_of_the_cpu_see_no_gpu(target: str) -> None:
    lines = make("--dry-run", "--always-make", target).replace("\\\n", "").splitlines()
    tests = [line for line in lines if " -m pytest" in line or " -m tests.mutants" in line]
    seeing = [line for line in tests if not line.startswith("CUDA_VISIBLE_DEVICES= ")]
    assert len(tests) > len(seeing)
    assert all("then" in line and "-m gpu" in line for line in seeing)
    assert len(seeing) == (target == "test-full")


SELECTED = re.compile(r" -m pytest .*?-m (\"[^\"]+\"|\w+)")


def selected(target: str) -> list[str]:
    """The marker expression of every call of pytest in a target."""
    expressions = SELECTED.findall(make("--dry-run", "--always-make", target).replace("\\\n", ""))
    return [expression.strip('"') for expression in expressions]


def test_every_tier_runs_its_own_tests_once() -> None:
    assert selected("test") == ["not full and not gpu"]
    full = "full and not faults and not learning"
    assert selected("test-full") == ["not full and not gpu", full, full, "gpu"]
    # What the first of the two leaves out is what the second one runs.
    parallel, serial = (
        line.split() for line in make("--dry-run", "test-full").splitlines() if f'"{full}"' in line
    )
    left_out = {word.removeprefix("--ignore=") for word in parallel if word.startswith("--ignore=")}
    assert left_out == {word for word in serial if word.startswith("tests/")}
    assert all((ROOT / path).exists() for path in left_out)
    assert selected("test-faults") == ["faults"]
    assert selected("test-learning") == ["learning"]


MARKED = """
import pytest

def test_quick(): ...

@pytest.mark.full
def test_long(): ...

@pytest.mark.gpu
def test_gpu(): ...

@pytest.mark.faults
def test_killed(): ...

@pytest.mark.learning
def test_learned(): ...
"""


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("not full and not gpu", "quick"),
        ("full and not faults and not learning", "long"),
        ("gpu", "gpu"),
        ("faults", "killed"),
        ("learning", "learned"),
    ],
)
def test_every_test_is_in_one_tier(tmp_path: Path, expression: str, expected: str) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "tests").mkdir()
    for name in ("slow.py", "slow.txt"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    (tmp_path / "test_marked.py").write_text(MARKED)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = "\n  ".join(project["tool"]["pytest"]["ini_options"]["markers"])
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n  {markers}\n")
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "--collect-only", "-m", expression]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.findall(r"::test_(\w+)", done.stdout) == [expected]
    commands = {"killed": "faults", "learned": "learning", "long": "full"}
    for name, tier in commands.items():
        assert (f"1 tests marked `{tier}`: make test-{tier}" in done.stdout) == (name != expected)


@pytest.fixture
def ci(tmp_path: Path) -> Path:
    """.ci/run in a folder of its own, with a `make` that fails for the targets in FAILING."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    fake = tmp_path / "bin" / "make"
    fake.write_text(
        '#!/bin/sh\nseq 99\necho "== 3 passed in $1 =="\ncase " $FAILING " in *" $1 "*) exit 2;; esac\n'
    )
    fake.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("failing", ["", "test", "test-sglang", "test test-sglang"])
def test_continuous_integration_runs_both_tiers_and_ends_with_their_closing_lines(
    ci: Path, failing: str
) -> None:
    env = {**os.environ, "PATH": f"{ci / 'bin'}{os.pathsep}{os.environ['PATH']}", "FAILING": failing}
    done = subprocess.run([ci / ".ci" / "run"], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == bool(failing)
    last = done.stdout.splitlines()[-26:]
    assert "== 3 passed in test ==" in last
    assert last[-1] == "== 3 passed in test-sglang =="


def test_every_direct_dependency_is_pinned_and_nothing_else() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in pins)
    assert {pin.split("==")[0].lower() for pin in pins} == {
        requirement.name.lower() for requirement in requirements("dev")
    }
