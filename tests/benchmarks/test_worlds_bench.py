"""The benchmark of environments plays the expert of each, interleaved."""

from __future__ import annotations

from agentrl.envs.registry import families
from benchmarks.worlds import bench_worlds, ids_of


def test_the_experts_of_all_environments_take_turns():
    ids = ["SolverCritic-v0", "CalendarQuestions-v0"]
    result = bench_worlds(ids=ids, episodes=2, at_once=2, repeats=2)
    *rows, together = result["rows"]
    assert [row["name"] for row in rows] == ids
    assert [len(row["expert"]["episodes_per_s"]) for row in rows] == [2, 2]
    assert set(result["summary"]) == {*ids, together["name"]}
    for sandbox in ("namespaces", "none"):
        assert len(together[sandbox]["calls_per_s"]["repeats"]) == 2
        assert 0 < together[sandbox]["p50_s"]["median"] <= together[sandbox]["p99_s"]["median"] < 60


def test_of_a_family_one_is_played_and_what_has_no_expert_is_left_out():
    ids = ids_of("*")
    assert {"HopSearch-v0", "Wordle-v0", "RockPaperScissors-v0"} <= set(ids)
    assert "SingleTurn-v0" not in ids
    for family in families().values():
        assert len(set(ids) & set(family)) <= 1
