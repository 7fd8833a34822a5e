"""A generate function and a group reward of a run's own, in training and in evaluations."""

from __future__ import annotations

import pytest

import agentrl
from agentrl.records import reconcile
from tests.flow.runs import TINY, journal_of, train
from tests.flow.worlds import HINT

PATHS = {
    "custom_generate_function_path": "tests.flow.worlds:hinted",
    "group_reward": "tests.flow.worlds:place",
}
SMALL = {**TINY, "num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "eval_episodes": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train("Talkative", tmp_path_factory.mktemp("runs"), "x", **SMALL, **PATHS).folder


def test_every_episode_is_played_by_the_function(folder):
    for pattern, number in (("step_*", 16), ("eval_*", 16)):
        entries = journal_of(folder, pattern)
        assert len(entries) == number
        for entry in entries:
            turn = entry["episode"]["trajectories"][0]["turns"][0]
            assert turn["observation"][-1]["content"] == HINT.content
            assert len(turn["observation"]) == 2
            completion = turn["tokens"]["completion"]
            assert len(completion["versions"]) == len(completion["logprobs"]) == len(completion["token_ids"])
    assert reconcile(folder).problems == ()


def test_every_group_is_rewarded_by_the_function_in_addition_to_the_environment(folder):
    for entry in journal_of(folder, "step_*"):
        (verdict,) = entry["verdicts"]
        assert verdict["parts"]["place"] == int(entry["episode"]["id"].split("-")[1])
        rest = verdict["parts"]["env"] + verdict["parts"]["length"]
        assert verdict["total"] == pytest.approx(rest + verdict["parts"]["place"])


def test_an_evaluation_has_the_same_settings(folder, tmp_path):
    report = agentrl.evaluate(
        "tests.flow.worlds:Talkative",
        str(folder / "checkpoint"),
        n=2,
        quiet=True,
        output_dir=str(tmp_path / "eval"),
        **PATHS,
    )
    assert "place" in report.parts
    entries = journal_of(tmp_path / "eval")
    observations = [e["episode"]["trajectories"][0]["turns"][0]["observation"] for e in entries]
    assert [messages[-1]["content"] for messages in observations] == [HINT.content] * 2
