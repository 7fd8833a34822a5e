"""Functions by path that play batches and evaluations, see episodes, change samples, and log."""

from __future__ import annotations

import json

import pytest

import agentrl
from agentrl.errors import ConfigError, UserError
from agentrl.records import reconcile
from tests.flow.runs import journal_of, metrics_of, train
from tests.flow.test_post_process import SMALL
from tests.flow.test_replay import replay_of, weights_of
from tests.flow.test_resume import SMALL as RESUMED
from tests.flow.test_resume import accounted, same

HERE = "tests.flow.own_functions"


def ids_of(folder, outcome):
    """The groups of an outcome in the journal of the steps, in order."""
    entries = journal_of(folder, "step_*")
    return list(dict.fromkeys(e["episode"]["id"].split("-")[0] for e in entries if e["outcome"] == outcome))


def test_a_rollout_function_that_plays_plainly_ends_with_the_weights_of_a_run_without_one(tmp_path):
    own = train("Talkative", tmp_path, "own", **RESUMED, rollout_function_path=f"{HERE}:played_plainly")
    same(own.folder, train("Talkative", tmp_path, "plain", **RESUMED).folder)


def test_each_prompt_that_a_rollout_function_draws_is_accounted_for_and_a_resumed_run_is_bit_equal(tmp_path):
    settings = {**RESUMED, "rollout_function_path": f"{HERE}:more_than_it_takes", "save_interval": 1}
    whole = train("Talkative", tmp_path, "whole", **settings).folder
    # Each iteration draws four prompts, plays three, and trains on two.
    assert ids_of(whole, "trained")[:4] == ["g2", "g3", "g6", "g7"]
    reasons = {e["reason"] for e in journal_of(whole, "step_*") if e["outcome"] == "dropped"}
    assert reasons == {"not_chosen"}
    found = accounted(whole)
    assert (found.started, found.trained, found.dropped) == (20, 10, {"not_chosen": 10})
    assert reconcile(whole).problems == ()

    parts = train("Talkative", tmp_path, "parts", **{**settings, "num_rollout": 2}).folder
    agentrl.train(parts, num_rollout=5, quiet=True)
    assert weights_of(parts) == weights_of(whole)


@pytest.mark.parametrize(("setting", "value"), [("max_staleness", 1), ("over_sampling_batch_size", 3)])
def test_what_starts_groups_otherwise_is_refused_beside_it(tmp_path, setting, value):
    with pytest.raises(ConfigError, match=f"{setting}.* with rollout_function_path, which starts the groups"):
        train(
            *("Talkative", tmp_path, "x"),
            **{**RESUMED, "rollout_function_path": f"{HERE}:played_plainly", "correction": "tis"},
            **{setting: value},
        )


def test_a_sample_hook_changes_rewards_before_they_are_scored_as_a_world_that_pays_so(tmp_path):
    small = {**SMALL, "eval_episodes": 32}
    pays = train("MirroredBandit", tmp_path, "pays", **small).folder
    hook = {"rollout_sample_hook_path": f"{HERE}:paid_otherwise"}
    changed = train("Bandit", tmp_path, "changed", **small, **hook).folder
    assert weights_of(changed) == weights_of(pays)
    entries = journal_of(changed, "step_*")
    seen = [e for e in entries if e["episode"].get("counts", {}).get("seen")]
    assert {e["episode"]["ending"] for e in seen} == {"completed"}
    # Evaluations see them as changed, too.
    assert any(e["episode"].get("counts", {}).get("seen") for e in journal_of(changed, "eval*"))
    assert weights_of(replay_of(changed, "Bandit", tmp_path, "again", SMALL)) == weights_of(changed)


def test_a_conversion_trains_on_less_and_its_replay_on_the_same(tmp_path):
    convert = {"custom_convert_samples_to_train_data_path": f"{HERE}:every_second_token"}
    plain = train("Talkative", tmp_path, "plain", **RESUMED).folder
    folder = train("Talkative", tmp_path, "x", **RESUMED, **convert).folder
    assert weights_of(folder) != weights_of(plain)
    tokens = [row["perf/actor_train_tok_per_s"] for row in metrics_of(folder) if "train/loss" in row]
    assert tokens
    again = replay_of(folder, "Talkative", tmp_path, "again", {**RESUMED, **convert})
    assert weights_of(again) == weights_of(folder)


def test_data_are_post_processed_by_the_trainers_logprobs_and_its_replay_the_same(tmp_path):
    process = {"rollout_data_postprocess_path": f"{HERE}:likely", "use_rollout_logprobs": False}
    plain = train("Talkative", tmp_path, "plain", **RESUMED, use_rollout_logprobs=False).folder
    folder = train("Talkative", tmp_path, "x", **RESUMED, **process).folder
    assert weights_of(folder) != weights_of(plain)
    again = replay_of(folder, "Talkative", tmp_path, "again", {**RESUMED, **process})
    assert weights_of(again) == weights_of(folder)


def test_metrics_of_a_function_are_logged_and_one_that_fails_ends_no_run(tmp_path):
    log = {"custom_rollout_log_function_path": f"{HERE}:number_of_turns"}
    folder = train("Talkative", tmp_path, "x", **RESUMED, **log).folder
    rows = [row for row in metrics_of(folder) if "own/turns" in row]
    assert [row["own/step"] for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(row["own/groups"] == 2.0 and 1.0 <= row["own/turns"] <= 3.0 for row in rows)


def test_an_evaluation_by_a_function_plays_what_it_says_and_logs_what_it_returns(tmp_path):
    own = {"eval_function_path": f"{HERE}:half_of_them", "metric_for_best_model": "eval/longest"}
    run = train("Talkative", tmp_path, "x", **RESUMED, **own)
    rows = [row for row in metrics_of(run.folder) if "eval/longest" in row]
    assert rows
    assert all(row["eval/longest"] >= 1.0 and "eval/greedy" not in row for row in rows)
    assert all("eval/sampled" in row for row in rows)
    files = sorted(path.name for path in (run.folder / "trajectories").glob("eval*"))
    assert files
    assert not any("greedy" in name for name in files)
    evals = journal_of(run.folder, "eval*before*")
    assert len(evals) == 2
    # A checkpoint has what the function measured, by which the best one is kept.
    state = json.loads(max((run.folder / "checkpoints").glob("step_*/state.json")).read_text())
    assert state["scores"].keys() >= {"0", "2"}
    assert all(milestone["own"]["eval/longest"] >= 1.0 for milestone in state["milestones"])


def test_a_source_that_adapts_goes_on_where_a_run_stopped(tmp_path):
    settings = {**RESUMED, "data_source_path": f"{HERE}:Harder", "save_interval": 1}
    whole = train("Talkative", tmp_path, "whole", **settings).folder
    tasks = [e["episode"]["task"]["id"] for e in journal_of(whole, "step_*")]
    assert list(dict.fromkeys(tasks))[:6] == ["0-0", "1-0", "2-2", "3-2", "4-4", "5-4"]
    parts = train("Talkative", tmp_path, "parts", **{**settings, "num_rollout": 2}).folder
    agentrl.train(parts, num_rollout=5, quiet=True)
    assert weights_of(parts) == weights_of(whole)
    again = [e["episode"]["task"]["id"] for e in journal_of(parts, "step_*")]
    assert again == tasks


def test_a_source_that_fails_names_itself(tmp_path):
    with pytest.raises(UserError, match=r"the source of prompts failed .*ZeroDivisionError"):
        train("Talkative", tmp_path, "x", **RESUMED, data_source_path=f"{HERE}:Failing")
