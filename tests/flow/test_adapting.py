"""What a run adapts, and what its critic learns before RL, in whole runs."""

from __future__ import annotations

import json

import pytest

from agentrl.errors import ConfigError
from agentrl.records import read_journal, reconcile
from agentrl.run.audit import audit
from agentrl.run.pretraining import CRITIC
from tests.flow.runs import WARM, metrics_of, train

ADAPTS = {
    **{"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_target": 5.0, "kl_horizon": 100.0},
    **{"entropy_target": 5.0, "entropy_coef_step": 0.001, "ref_update_interval": 2, "ref_mixup_alpha": 0.5},
}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    return train("Bandit", tmp_path_factory.mktemp("runs"), "earlier", num_rollout=3, **WARM)


def coefficients(folder):
    rows = [row for row in metrics_of(folder) if "train/kl_coef" in row]
    return [(row["train/kl_coef"], row["train/entropy_coef"], row["train/kl_loss"]) for row in rows]


@pytest.mark.full
def test_coefficients_and_a_reference_that_move_survive_a_resume(tmp_path, earlier):
    shared = {"hf_checkpoint": str(earlier.folder / "checkpoint"), "save_interval": 1, **ADAPTS}
    straight = train("Bandit", tmp_path, "straight", num_rollout=4, **shared)
    train("Bandit", tmp_path, "halves", num_rollout=2, lr_decay_style="constant", **shared)
    halves = train("Bandit", tmp_path, "halves", num_rollout=4, resume=True, **shared)
    assert coefficients(halves.folder) == coefficients(straight.folder)
    (kl, entropy, first), *_, (last_kl, last_entropy, _) = coefficients(straight.folder)
    assert (kl, entropy) == (0.05, 0.0)
    assert last_kl < kl, "below the target the penalty shrinks"
    assert last_entropy == pytest.approx(0.003)
    assert first == pytest.approx(0.0, abs=1e-6), "the reference begins as the policy"


def test_a_critic_learns_from_an_earlier_run_first(tmp_path, earlier):
    shared = {
        **{"hf_checkpoint": str(earlier.folder / "checkpoint-warm-start"), "num_rollout": 1},
        **{"advantage_estimator": "ppo", "critic_lr": 5e-3, "eval_episodes": 8},
    }
    alone = train("Bandit", tmp_path, "alone", **shared)
    data = {"critic_data": str(earlier.folder), "critic_data_epochs": 4}
    taught = train("Bandit", tmp_path, "taught", **shared, **data)
    first, with_data = (
        next(row for row in metrics_of(run.folder) if "train/value_loss" in row) for run in (alone, taught)
    )
    assert with_data["train/value_loss"] < 0.8 * first["train/value_loss"]
    # The policy that played the first batch is the same: only the critic had learned.
    assert with_data["rollout/raw_reward"] == first["rollout/raw_reward"]
    stages = {stage.name: stage for stage in taught.stages}
    assert stages[CRITIC].steps == 4 * 3
    assert CRITIC not in {stage.name for stage in alone.stages}
    state = json.loads((taught.folder / "summary.json").read_text())
    assert state


def test_a_greedy_sibling_is_played_and_journalled_and_not_trained_on(tmp_path, earlier):
    shared = {"hf_checkpoint": str(earlier.folder / "checkpoint-warm-start"), "num_rollout": 2}
    sizes = {"rollout_batch_size": 8, "n_samples_per_prompt": 3, "eval_episodes": 8}
    run = train("Bandit", tmp_path, "remax", advantage_estimator="remax", **shared, **sizes)
    books = reconcile(run.folder)
    assert books.problems == ()
    assert books.played == 2 * 8 * 4
    assert books.dropped["greedy_baseline"] == 2 * 8
    accounts = audit(run.folder)
    assert accounts.problems == ()
    assert set(accounts.dropped) <= {"zero_std", "zero_advantage"}
    assert accounts.trained > 0
    files = sorted((run.folder / "trajectories").glob("step_*"))
    for entry in (entry for path in files for entry in read_journal(path)):
        is_last = entry.episode.id.partition("-")[2].startswith("3")
        assert entry.episode.is_greedy == is_last == (entry.reason == "greedy_baseline")
        assert bool(entry.advantages) == (not is_last)
    rows = metrics_of(run.folder)
    assert {row["rollout/greedy_reward"] for row in rows if "rollout/greedy_reward" in row} <= {
        n / 8 for n in range(9)
    }


def test_data_of_a_critic_that_are_not_there_are_named_before_anything_is_played(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere"):
        train("Bandit", tmp_path, "x", advantage_estimator="ppo", critic_data="nowhere", num_rollout=1)
    assert not (tmp_path / "x" / "metrics.jsonl").exists()
