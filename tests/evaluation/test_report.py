"""Failures are in no mean, and every mean has its interval."""

from __future__ import annotations

import json
import tempfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from agentrl import Limits, Task, Verdict, say
from agentrl.engine.config import EngineConfig
from agentrl.evaluation.config import EvalConfig
from agentrl.evaluation.players import _engine_folder
from agentrl.evaluation.report import EvalSetting, summarize
from agentrl.evaluation.statistics import mean_of
from agentrl.types import Ending, Episode, Failure, ToolStats, Trajectory, Turn
from tests.worlds import turn_tokens

SETTING = EvalSetting("Env-v0", "test", 0.7, None)


def episode(name, ending=Ending.COMPLETED, *, failure=None, policy=(), counts=None, tools=None, **metadata):
    turns = tuple(Turn((), say("x"), turn_tokens(5, n), k) for k, n in enumerate(policy))
    return Episode(
        id=name,
        env_id="Env-v0",
        task=Task.ask("t", "?", **metadata),
        seed=zlib.crc32(name.encode()),
        limits=Limits(),
        trajectories=(Trajectory(turns),) if turns else (),
        step_rewards=(),
        ending=Ending.FAILED if failure else ending,
        failure=failure,
        counts=counts or {},
        tools=tools or {},
    )


def report_of(scores, setting=SETTING, episodes=None):
    episodes = episodes or [episode(f"e{n}") for n in range(len(scores))]
    verdicts = [Verdict(e.id, "env", score) for e, score in zip(episodes, scores, strict=False)]
    return summarize(episodes, verdicts, setting, seconds=1.5)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
def test_the_mean_is_numpys_and_its_interval_that_of_tasks(scores):
    report = report_of(scores)
    assert report.n == len(scores)
    assert report.mean == pytest.approx(np.mean(scores), abs=1e-9)
    assert (report.low, report.high) == mean_of([[score] for score in scores])[1:3]


def test_episodes_that_all_agree_have_an_interval():
    report = report_of([1.0] * 8)
    low, high = stats.binomtest(8, 8).proportion_ci(method="wilson")
    assert (report.mean, report.low, report.high) == pytest.approx((1.0, low, high))
    assert report.scores()["mean"] == "1.000 (0.676 to 1.000)"


def test_a_task_that_is_played_again_is_no_further_task():
    """Of two tasks, one is always solved: whatever the number of episodes, that is what is known."""
    wide = report_of([1.0, 0.0])
    episodes = [replace(episode(f"e{n}"), task=Task.ask(f"t{n % 2}", "?")) for n in range(400)]
    report = report_of([float(n % 2) for n in range(400)], episodes=episodes)
    assert (report.n, report.tasks, report.mean) == (400, 2, 0.5)
    assert report.high - report.low >= wide.high - wide.low > 0.5
    assert dict(report.rows())["tasks"] == "2"


def test_only_agents_with_a_turn_are_in_the_score():
    turns = (Turn((), say("x"), turn_tokens(5, 2), 0),)
    both = ("planner", "searcher")
    episodes = [
        replace(episode("e0"), agents=both, trajectories=(Trajectory(turns, agent="planner"),)),
        replace(
            episode("e1"),
            agents=both,
            trajectories=tuple(
                Trajectory((replace(turns[0], step=n),), agent=name) for n, name in enumerate(both)
            ),
        ),
    ]
    verdicts = [
        Verdict(f"e{n}", "env", score, agent=name)
        for n, of_both in enumerate([(1.0, 0.0), (1.0, 1.0)])
        for name, score in zip(both, of_both, strict=True)
    ]
    report = summarize(episodes, verdicts, SETTING, seconds=1.0)
    assert (report.mean, report.by) == (1.0, {"agent=planner": 1.0, "agent=searcher": 1.0})


def test_without_a_score_there_is_no_interval():
    report = summarize([], [], SETTING, seconds=0.0)
    assert (report.n, report.mean, report.low, report.high) == (0, 0.0, 0.0, 0.0)


def test_failures_are_counted_by_kind_and_stand_in_no_mean():
    played = [
        episode("e0", policy=(3, 4), counts={"tool_calls": 2}),
        episode("e1", failure=Failure("tool", "error", "x"), policy=(100,), counts={"tool_calls": 9}),
        episode("e2", Ending.TRUNCATED, policy=(1,), counts={"tool_calls": 1, "malformed_calls": 1}),
        episode("e3", failure=Failure("reset", "timeout", "x")),
        episode("e4", failure=Failure("tool", "error", "y")),
        episode("e5", Ending.ABORTED),
    ]
    verdicts = [Verdict("e0", "env", 1.0), Verdict("e2", "env", 0.0)]
    report = summarize(played, verdicts, SETTING, seconds=2.0)
    assert (report.n, report.mean) == (2, 0.5)
    assert report.failures == {"tool_error": 2, "reset_timeout": 1, "aborted": 1}
    assert report.endings == {"completed": 1, "failed": 3, "truncated": 1, "aborted": 1}
    assert (report.turns, report.policy_tokens) == (1.5, 4.0)
    assert report.counts == {"tool_calls": 3, "malformed_calls": 1}
    assert report.seconds == 2.0


def test_the_breakdown_splits_the_mean_by_a_key_of_the_task():
    played = [episode(f"e{n}", hops=hops) for n, hops in enumerate([1, 2, 2, 1, 2])]
    setting = EvalSetting("Env-v0", "test", 0.7, "hops")
    report = report_of([1.0, 0.0, 1.0, 0.0, 1.0], setting, played)
    assert report.by == {"hops=1": 0.5, "hops=2": pytest.approx(2 / 3)}
    assert list(report.by) == ["hops=1", "hops=2"]


def test_verdicts_are_matched_by_episode_not_by_place():
    played = [episode("e0", hops=1), episode("e1", hops=2)]
    setting = EvalSetting("Env-v0", "test", 0.7, "hops")
    verdicts = [Verdict("e1", "env", 1.0), Verdict("e0", "env", 0.0)]
    assert summarize(played, verdicts, setting, seconds=0.0).by == {"hops=1": 0.0, "hops=2": 1.0}


def test_parts_are_reported_unless_only_steps_are_rewarded():
    played = [episode("e0"), episode("e1")]
    parts = [{"env": 1.0, "brevity": 4.0}, {"env": 0.0}]
    verdicts = [Verdict(e.id, "env", 0.0, own) for e, own in zip(played, parts, strict=True)]
    assert summarize(played, verdicts, SETTING, seconds=0.0).parts == {"brevity": 2.0, "env": 0.5}
    plain = [Verdict(e.id, "env", 0.0, {"env": 0.0}) for e in played]
    assert summarize(played, plain, SETTING, seconds=0.0).parts == {}


def test_the_time_of_a_call_is_a_mean_over_those_that_could_be_read():
    played = [
        episode("e0", tools={"a/b": ToolStats(calls=3, malformed=1, seconds=0.003)}),
        episode("e1", tools={"a/b": ToolStats(calls=2, seconds=0.001), "c": ToolStats(calls=1, malformed=1)}),
    ]
    report = report_of([1.0, 1.0], episodes=played)
    assert report.tool_ms == {"a/b": pytest.approx(1.0)}
    assert report.counts == {
        "tool/a/b/calls": 5,
        "tool/a/b/malformed": 1,
        "tool/c/calls": 1,
        "tool/c/malformed": 1,
    }


def test_calls_are_counted_by_latency_and_failures_by_kind():
    tools = {"a/b": ToolStats(calls=3, took={"10ms": 2, "more": 1})}
    failure = Failure("tool", "crashed", "dead")
    played = [
        episode("e0", tools=tools),
        episode("e1", tools=tools),
        episode("e2", failure=failure, tools={"a/b": ToolStats(calls=1, failed={"crashed": 1})}),
    ]
    report = report_of([1.0, 0.0], episodes=played)
    assert report.tool_took == {"a/b": {"10ms": 4, "more": 2}}
    assert report.tool_failures == {"a/b": {"crashed": 1}}
    assert report.failures == {"tool_crashed": 1}


def test_a_report_is_json_in_the_order_of_its_fields():
    plain = json.loads(json.dumps(report_of([1.0, 0.0]).as_json()))
    assert list(plain)[:8] == ["env_id", "split", "temperature", "n", "mean", "low", "high", "by"]
    assert (plain["env_id"], plain["split"], plain["temperature"]) == ("Env-v0", "test", 0.7)


def test_only_an_evaluation_that_starts_servers_makes_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for engine, folders in (("embedded", 0), ("sglang", 1)):
        with _engine_folder(EvalConfig(engine=EngineConfig(engine=engine))):
            assert len(list(tmp_path.iterdir())) == folders
