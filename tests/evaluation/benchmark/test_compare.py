"""Comparisons pair the episodes of common tasks."""

from __future__ import annotations

import json

import pytest

from agentrl.cli import main
from agentrl.errors import ConfigError
from agentrl.evaluation.benchmark.compare import BenchmarkComparison, Side
from tests.evaluation.benchmark.test_run import W, play, suite_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    play(root / "a", suite_of(["Guess"], models=("expert", "null"), n=12))
    play(root / "b", suite_of(["Guess"], models=("expert",), n=8))
    play(root / "c", suite_of(["Tools"], models=("expert",), n=4))
    return root


def compared(first, second):
    return BenchmarkComparison.of(Side.read(str(first)), Side.read(str(second)))


def test_two_policies_of_one_benchmark_differ_on_every_task(folders):
    (row,) = compared(f"{folders / 'a'}:null", f"{folders / 'a'}:expert").rows
    assert (row.tasks, row.better, row.worse, row.only_first, row.only_second) == (12, 12, 0, 0, 0)
    # All of 12 agree: Wilson's upper bound of the share that does not is z^2 / (12 + z^2).
    assert row.difference[:3] == pytest.approx((1.0, 1.0 - 2 * 3.84146 / (12 + 3.84146), 1.0), abs=1e-5)
    assert (row.first_mean, row.second_mean) == (0.0, 1.0)
    assert row.note == ""


def test_two_benchmarks_are_compared_on_common_tasks_by_policies_of_one_name(folders):
    (row,) = compared(folders / "a", folders / "b").rows
    assert (row.first, row.second, row.tasks, row.only_first) == ("expert", "expert", 8, 4)
    assert row.difference.value == 0.0
    assert row.note == "other settings", "n differs"


def test_nothing_in_common_is_an_error_with_a_remedy(folders):
    with pytest.raises(ConfigError, match="no finished environment and policy in common"):
        compared(folders / "a", folders / "c")
    with pytest.raises(ConfigError, match=r"has no policy `exprt`\. Did you mean `expert`"):
        compared(f"{folders / 'a'}:exprt", folders / "b")
    with pytest.raises(ConfigError, match="holds no benchmark"):
        compared(folders, folders / "b")


def test_the_command_prints_the_comparison(folders, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    main(["benchmark", "compare", f"{folders / 'a'}:null", f"{folders / 'b'}:expert", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["env"] == f"{W}:Guess"
    low = pytest.approx(1.0 - 2 * 3.84146 / (8 + 3.84146), abs=1e-5)
    assert row["difference"] == {"value": 1.0, "low": low, "high": 1.0, "method": "wilson"}
    main(["benchmark", "compare", f"{folders / 'a'}:null", f"{folders / 'b'}:expert"])
    assert "1.000 [0.351, 1.000]" in capsys.readouterr().out
