"""`agentrl envs check`: a table for people, JSON for machines, exit codes for both."""

from __future__ import annotations

import json

import pytest

from agentrl.cli import envs, main
from tests.envs.check.broken import Good


def run(capsys, *arguments):
    """The exit code, standard output and standard error of a command."""
    try:
        main(["envs", "check", *arguments])
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_good_world_is_printed_as_a_table_and_exits_with_0(capsys):
    code, out, _ = run(capsys, f"{Good.__module__}:Good", "--n", "4")
    assert code == 0
    assert "expert_score" in out
    assert "passed: 0 errors, 0 warnings." in out


def test_a_broken_world_exits_with_1_and_prints_its_finding(capsys):
    code, out, _ = run(capsys, "tests.envs.check.cheated:PaysNothing", "--n", "4")
    assert code == 1
    assert "error above-chance" in out
    assert "failed: 1 error, 0 warnings." in out


def test_a_single_warning_exits_with_0(capsys):
    code, out, _ = run(capsys, f"{Good.__module__}:Bookless", "--n", "4")
    assert code == 0
    assert "warning no-expert" in out


@pytest.mark.parametrize(("world", "code"), [("broken:Good", 0), ("cheated:PaysNothing", 1)])
def test_the_json_flag_prints_exactly_one_json_object(capsys, world, code):
    exit_code, out, _ = run(capsys, f"tests.envs.check.{world}", "--n", "4", "--seed", "2", "--json")
    report = json.loads(out)
    assert exit_code == code
    assert set(report) == {"env", "ok", "seed", "findings", "figures", "checks"}
    assert report["ok"] == (code == 0)
    assert report["seed"] == 2
    assert [finding["severity"] for finding in report["findings"]] == ["error"] * code


@pytest.mark.parametrize(
    "arguments", [["NoSuch-v0"], ["HopSearch-v0", "--n", "0"], ["HopSearch-v0", "--n", "x"], []]
)
def test_bad_input_is_a_one_sentence_error_and_exits_with_2(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("agentrl: ")
    assert err.count("\n") == 1


def test_arguments_of_the_constructor_reach_every_instance(capsys):
    code, out, err = run(
        capsys, "tests.envs.check.test_faults:Sized", "--n", "2", "--env-kwargs", '{"size": 3}'
    )
    assert (code, "passed: 0 errors" in out) == (0, True), out + err
    code, _, err = run(capsys, "tests.envs.check.test_faults:Sized")
    assert (code, "missing a required argument: 'size'" in err) == (2, True)


def test_without_a_terminal_a_long_check_says_what_it_does_and_a_short_one_does_not(capsys, monkeypatch):
    main(["envs", "check", "tests.envs.check.broken:Good", "--n", "2"])
    assert "checking" not in capsys.readouterr().err
    monkeypatch.setattr(envs, "LONG_S", 0.0)
    main(["envs", "check", "tests.envs.check.broken:Good", "--n", "2"])
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("checking: ")]
    assert [line.partition(" (after")[0] for line in lines[:3]] == [
        "checking: tasks",
        "checking: the expert",
        "checking: random and adversarial policies",
    ]
    assert "checking" not in printed.out
