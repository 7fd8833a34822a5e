"""Whole runs whose policy learns adapters."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.flow.runs import WARM, metrics_of, train

LORA = {
    **{"lora_rank": 8, "lora_alpha": 16, "lr": 1e-2, "save_interval": 1, "eval_interval": 1000},
    **{"use_kl_loss": True, "kl_loss_coef": 0.01},
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    run = train("Bandit", tmp_path_factory.mktemp("runs"), "warm", num_rollout=0, **WARM)
    return run.folder / "checkpoint"


def test_it_learns_stays_near_its_reference_and_goes_on_where_it_was_stopped(warm, tmp_path):
    shared = {"hf_checkpoint": str(warm), **LORA}
    straight = train("Bandit", tmp_path, "straight", num_rollout=6, **shared)
    rows = [row for row in metrics_of(straight.folder) if "train/kl_loss" in row]
    assert rows[0]["train/kl_loss"] == pytest.approx(0.0, abs=1e-6), "the reference begins as the policy"
    assert rows[-1]["train/kl_loss"] > 1e-4
    assert rows[-1]["rollout/raw_reward"] > rows[0]["rollout/raw_reward"] + 0.05
    # The engine samples from the weights with the adapters added.
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (warm, straight.folder / "checkpoint")
    )
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}

    train("Bandit", tmp_path, "halves", num_rollout=3, **shared)
    halves = train("Bandit", tmp_path, "halves", num_rollout=6, resume=True, **shared)
    resumed = load_file(halves.folder / "checkpoint" / "model.safetensors")
    assert all(torch.equal(resumed[name], after[name]) for name in after)


def test_an_actor_with_a_critic_learns_adapters_of_both(warm, tmp_path):
    settings = {"advantage_estimator": "ppo", "critic_lr": 5e-3, "num_rollout": 2, "eval_interval": 1000}
    run = train("Bandit", tmp_path, "ppo", hf_checkpoint=str(warm), lora_rank=4, **settings)
    rows = [row for row in metrics_of(run.folder) if "train/value_loss" in row]
    assert len(rows) == 2
    assert all(row["train/critic_grad_norm"] > 0 for row in rows)


def test_layers_that_are_computed_again_change_no_bit(warm, tmp_path):
    shared = {"hf_checkpoint": str(warm), "num_rollout": 2, "eval_interval": 1000}
    plain = train("Bandit", tmp_path, "plain", **shared)
    again = train("Bandit", tmp_path, "again", gradient_checkpointing=True, **shared)
    weights = [load_file(run.folder / "checkpoint" / "model.safetensors") for run in (plain, again)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
