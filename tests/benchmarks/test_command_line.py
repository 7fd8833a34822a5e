"""The command line of `python -m benchmarks`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentrl.cli import cli as product
from benchmarks.__main__ import cli, main
from tests.house.source import ROOT

NAMES = {
    *("async", "embedded", "envs", "gateway", "gateways", "generator", "gpu", "openenv"),
    *("peers", "players", "python", "quickstart", "tasks", "trainer", "update"),
}


def test_help_names_every_benchmark_and_the_folder_to_start_it_in():
    command = [sys.executable, "-m", "benchmarks", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert set(cli.commands) == NAMES
    assert all(name in done.stdout for name in NAMES)
    assert "from the project's root" in done.stdout


def test_make_bench_runs_every_benchmark():
    done = subprocess.run(
        ["make", "--dry-run", "bench"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    run = {
        line.split(" -m benchmarks ")[1].split()[0]
        for line in done.stdout.splitlines()
        if " -m benchmarks " in line
    }
    assert run == NAMES


def test_no_benchmark_is_a_command_of_the_package():
    assert "bench" not in product.offers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engin"], "No such command 'engin'"),
        (["peers", "--only", "manny"], "mean `many`"),
        (["peers", "--verifiers-python", "no-such-python"], "does not run verifiers (No such file"),
        (
            ["update", "--sglang-python", sys.executable],
            "does not run SGLang (it lacks sglang,",
        ),
        (["quickstart", "--episodes", "0"], "episodes"),
        (["async", "speeedup"], "'speeedup' is not one of"),
    ],
)
def test_a_mistake_is_a_one_line_error(capsys, arguments, message):
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
