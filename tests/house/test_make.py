"""The make targets, and the one entry point of continuous integration."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.house.source import ROOT, requirements

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = (
    *("help", "install", "sglang-cpu", "quickstart", "test", "lint", "test-full", "mutants", "bench"),
    "clean",
)


def make(*arguments: str) -> str:
    # Inside `make test` this would be a sub-make, which announces the folders it enters and leaves.
    outside = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=outside, capture_output=True, text=True, check=True
    ).stdout


def test_help_is_the_default_and_lists_every_target() -> None:
    assert make() == make("help")
    listed = {line.split()[1] for line in make().splitlines()}
    assert listed == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_expands(target: str) -> None:
    assert make("--dry-run", target)


@pytest.mark.parametrize("target", ["test", "test-full", "mutants"])
def test_tests_of_the_cpu_see_no_gpu(target: str) -> None:
    lines = make("--dry-run", "--always-make", target).replace("\\\n", "").splitlines()
    tests = [line for line in lines if " -m pytest" in line or " -m tests.mutants" in line]
    seeing = [line for line in tests if not line.startswith("CUDA_VISIBLE_DEVICES= ")]
    assert len(tests) > len(seeing)
    assert all("then" in line and "-m gpu" in line for line in seeing)
    assert len(seeing) == (target == "test-full")


def test_continuous_integration_runs_make_test() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "exec make test"


def test_every_direct_dependency_is_pinned_and_nothing_else() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in pins)
    assert {pin.split("==")[0].lower() for pin in pins} == {one.name.lower() for one in requirements("dev")}
