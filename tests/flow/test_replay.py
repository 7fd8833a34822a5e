"""A journal that is trained on gives the weights of the run that wrote it; and episodes are only played."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import agentrl
from agentrl.cli import main
from agentrl.errors import ConfigError
from agentrl.records import reconcile
from agentrl.run.audit import audit
from tests.flow.runs import TINY, WARM, journal_of, metrics_of, tokens_of, train
from tests.flow.worlds import Patchy

SMALL = {
    **TINY,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_episodes": 4,
    "use_tensorboard": False,
}
PATCHY = {
    **SMALL,
    "num_rollout": 3,
    "num_steps_per_rollout": 2,
    "max_episode_retries": 1,
    "dynamic_sampling_filter_path": "tests.flow.worlds:drop_some_without_signal",
    "rollout_sample_filter_path": "tests.flow.worlds:every_second",
    **{**WARM, "warm_start_steps": 4, "num_demonstrations": 32},
}
PLAYED = (
    "max_staleness",
    "max_episode_retries",
    "dynamic_sampling_filter_path",
    "rollout_batch_size",
    "n_samples_per_prompt",
)
EVALUATED = ("eval_episodes", "eval_interval", "max_slots")


def replay_of(folder, world, output_dir, name, settings, **changed):
    """The run that trains on the journal in a folder, with the settings that act there."""
    acting = {key: value for key, value in settings.items() if key not in (*PLAYED, *EVALUATED)}
    options = {**acting, "replay": str(folder), **changed}
    fixed = {"inline": True, "output_dir": str(output_dir), "name": name, "env": f"tests.flow.worlds:{world}"}
    return agentrl.train(quiet=True, **{**options, **fixed}).folder


def weights_of(folder, name="checkpoint"):
    return (folder / name / "model.safetensors").read_bytes()


def learned(folder):
    """What the steps of a run measured, without the clock, the engine and evaluations."""
    rows = [row for row in metrics_of(folder) if "train/optimizer_steps" in row]
    left_out = ("time_s", "perf/", "engine/", "eval/")
    return [{name: v for name, v in row.items() if not name.startswith(left_out)} for row in rows]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with failed episodes, broken groups, groups that a filter dropped, and a warm start."""
    Patchy.chance.seed(2)
    return train("Patchy", tmp_path_factory.mktemp("runs"), "original", **PATCHY).folder


@pytest.fixture(scope="module")
def replayed(original, tmp_path_factory):
    return replay_of(original, "Patchy", tmp_path_factory.mktemp("again"), "replayed", PATCHY)


def test_the_run_had_everything_that_a_journal_can_hold(original):
    entries = journal_of(original, "step_*")
    dropped = reconcile(original).dropped
    assert {"reset_error", "group_incomplete", "zero_std"} <= dropped.keys()
    # One reason, of the filter and of groups that were in their batch: these count in the loss weights.
    in_batch = {entry.get("in_batch", True) for entry in entries if entry.get("reason") == "zero_std"}
    assert in_batch == {True, False}
    assert sum(row["train/optimizer_steps"] for row in learned(original)) >= 5


def test_a_replay_ends_with_the_weights_of_the_run_bit_for_bit(original, replayed):
    assert weights_of(replayed, "checkpoint-warm-start") == weights_of(original, "checkpoint-warm-start")
    assert weights_of(replayed) == weights_of(original)
    assert weights_of(replayed) != weights_of(original, "checkpoint-warm-start")


def test_a_replay_has_the_metrics_and_the_journal_of_the_run(original, replayed):
    assert learned(replayed) == learned(original)
    assert journal_of(replayed, "step_*") == journal_of(original, "step_*")
    assert replace(audit(replayed), episodes=None) == replace(audit(original), episodes=None)


def test_a_replay_starts_no_engine_and_evaluates_nothing(replayed):
    assert not (replayed / "engine").exists()
    assert journal_of(replayed, "eval_*") == []
    assert not any(name.startswith(("eval/", "engine/")) for row in metrics_of(replayed) for name in row)
    assert "from the journal of" in (replayed / "report.html").read_text()


def test_a_replay_that_stopped_resumes(original, replayed, tmp_path):
    folder = replay_of(original, "Patchy", tmp_path, "parts", PATCHY, num_rollout=2)
    assert weights_of(folder) != weights_of(replayed)
    agentrl.train(folder, quiet=True, num_rollout=3)
    assert weights_of(folder) == weights_of(replayed)
    assert journal_of(folder) == journal_of(replayed)


def test_another_algorithm_learns_from_the_same_journal(original, replayed, tmp_path):
    folder = replay_of(original, "Patchy", tmp_path, "rloo", PATCHY, advantage_estimator="rloo")
    assert learned(folder)[0]["rollout/raw_reward"] == learned(original)[0]["rollout/raw_reward"]
    assert weights_of(folder) != weights_of(replayed)


GREEDY = {**SMALL, "num_rollout": 2, "advantage_estimator": "remax"}


@pytest.fixture(scope="module")
def with_greedy(tmp_path_factory):
    """A run whose groups have a greedy sibling each."""
    return train("Bandit", tmp_path_factory.mktemp("greedy"), "remax", **GREEDY).folder


def test_greedy_siblings_are_replayed_with_the_estimator_that_needs_them(with_greedy, tmp_path):
    folder = replay_of(with_greedy, "Bandit", tmp_path, "again", GREEDY)
    assert weights_of(folder) == weights_of(with_greedy)
    assert journal_of(folder, "step_*") == journal_of(with_greedy, "step_*")


def test_other_estimators_do_without_greedy_siblings(with_greedy, tmp_path):
    folder = replay_of(with_greedy, "Bandit", tmp_path, "rloo", GREEDY, advantage_estimator="rloo")
    entries = journal_of(folder)
    assert len(entries) == len(journal_of(with_greedy, "step_*")) - 2 * 4 == 2 * 4 * 4
    assert not any(entry["reason"] == "greedy_baseline" for entry in entries)
    assert not any("rollout/greedy_reward" in row for row in metrics_of(folder))


def test_an_estimator_that_needs_greedy_siblings_refuses_a_journal_without(original, tmp_path):
    with pytest.raises(ConfigError, match=r"`remax` compares with a greedy episode.*played without"):
        replay_of(original, "Patchy", tmp_path, "refused", PATCHY, advantage_estimator="remax")
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Two batches that were only played, in two attempts, and what the second one printed."""
    place = tmp_path_factory.mktemp("played")
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if type(value) is not bool
    ]
    flags = [flag for flag in flags if not flag.startswith(("--eval", "--lr"))]
    world = ("--env=tests.flow.worlds:Scarce", "--inline", "--no-use-tensorboard")
    main(["rollout", *flags, *world, "--num-rollout=1", f"--output-dir={place}", "--name=x", "--quiet"])
    return place / "x"


@pytest.fixture(scope="module")
def resumed(played):
    agentrl.train(played, quiet=True, num_rollout=2)
    return played


def test_a_rollout_writes_the_folder_of_a_run_and_trains_nothing(played):
    names = {path.name for path in played.iterdir()}
    assert {"config.toml", "metrics.jsonl", "trajectories", "report.html", "summary.json"} <= names
    assert not names & {"checkpoint", "trainer", "checkpoint-warm-start"}
    counts = reconcile(played)
    assert (counts.problems, counts.trained, counts.recorded) == ((), 0, 16)
    (row,) = metrics_of(played)
    assert {"rollout/raw_reward", "perf/rollout_time", "perf/event_loop_lag_max"} <= row.keys()
    assert not any(name.startswith(("train/", "eval/")) for name in row)
    assert "played, not trained on" in (played / "report.html").read_text()
    assert "step 1" in (played / "report.html").read_text()


def test_a_rollout_resumes_and_every_prompt_is_accounted_for(resumed, capsys):
    found = audit(resumed)
    assert (found.problems, found.started, found.recorded, found.trained) == ((), 8, 8, 0)
    main(["runs", "audit", str(resumed)])
    assert "recorded                       8" in capsys.readouterr().out


def test_a_rollout_prints_json(tmp_path, capsys):
    small = [
        f"--{name.replace('_', '-')}={SMALL[name]}" for name in ("hidden_size", "vocab_size", "num_layers")
    ]
    flags = ["--num-rollout=1", "--rollout-batch-size=1", "--n-samples-per-prompt=1", "--inline", *small]
    world = "--env=tests.flow.worlds:Bandit"
    main(["rollout", world, *flags, f"--output-dir={tmp_path}", "--name=x", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed.pop("raw_reward") in (0.0, 1.0)
    assert printed == {
        **{"folder": str(tmp_path / "x"), "steps": 1, "episodes": 1, "recorded": 1},
        "dropped": {},
    }


def test_what_was_only_played_trains_as_if_it_had_been_played_for_it(resumed, tmp_path):
    """The first step of a run, against the first of the recorded ones: the policy was the same."""
    run = train("Scarce", tmp_path, "run", **SMALL, num_rollout=1).folder
    replayed = replay_of(resumed, "Scarce", tmp_path, "replayed", SMALL, num_rollout=1)
    assert weights_of(replayed) == weights_of(run)
    outcomes = [
        [(entry["outcome"], entry.get("reason"), tokens_of(entry)) for entry in journal_of(folder, "step_*")]
        for folder in (replayed, run)
    ]
    assert outcomes[0] == outcomes[1]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="a rank of torch"),
        pytest.param({"trainer": "megatron", "actor_num_gpus_per_node": 2}, id="two ranks of Megatron"),
    ],
)
def test_a_trainer_in_processes_replays_bit_for_bit(tmp_path, layout):
    settings = {**SMALL, "num_rollout": 2, "num_steps_per_rollout": 2, **layout}
    run = train("Talkative", tmp_path, "run", **settings, inline=False).folder
    acting = {key: value for key, value in settings.items() if key not in (*PLAYED, *EVALUATED)}
    options = {**acting, "output_dir": str(tmp_path), "env": "tests.flow.worlds:Talkative"}
    replayed = agentrl.train(quiet=True, name="again", replay=str(run), **options).folder
    assert weights_of(replayed) == weights_of(run)
    assert learned(replayed) == learned(run)
