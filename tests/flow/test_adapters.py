"""Whole runs whose policy learns adapters."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import agentrl
from agentrl.cli import main
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
    files = {path.name for path in (straight.folder / "checkpoint").iterdir()}
    assert {"adapter_config.json", "tokenizer.json"} <= files
    assert "config.json" not in files
    after = load_file(straight.folder / "checkpoint" / "adapter_model.safetensors")
    adapted = {name.split(".")[-3] for name in after}
    assert adapted == {f"{matrix}_proj" for matrix in ("q", "k", "v", "o", "gate", "up", "down")}
    assert all(torch.any(tensor != 0) for tensor in after.values())

    train("Bandit", tmp_path, "halves", num_rollout=3, **shared)
    halves = train("Bandit", tmp_path, "halves", num_rollout=6, resume=True, **shared)
    resumed = load_file(halves.folder / "checkpoint" / "adapter_model.safetensors")
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


@pytest.fixture(scope="module")
def first(warm, tmp_path_factory):
    """The checkpoint of a run, its adapters."""
    options = {"num_rollout": 2, "hf_checkpoint": str(warm), **LORA}
    return train("Bandit", tmp_path_factory.mktemp("runs"), "first", **options).folder / "checkpoint"


@pytest.fixture(scope="module")
def merged(first):
    """The whole model of these."""
    main(["convert", str(first), str(first.with_name("merged"))])
    return first.with_name("merged")


def test_adapters_are_played_as_the_whole_model_is(warm, first, merged):
    models = (first, merged, warm)
    options = {"n": 32, "temperature": 1.0, "quiet": True, "max_slots": 64}
    scores = [agentrl.evaluate("tests.flow.worlds:Bandit", str(model), **options).mean for model in models]
    assert scores[0] == scores[1] != scores[2]


def test_a_run_without_adapters_begins_with_the_whole_model(first, merged, tmp_path):
    runs = [
        train("Bandit", tmp_path, model.name, num_rollout=1, hf_checkpoint=str(model)).folder
        for model in (first, merged)
    ]
    states = [load_file(folder / "checkpoint" / "model.safetensors") for folder in runs]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert not (runs[0] / "checkpoint" / "adapter_config.json").exists()


def test_new_adapters_are_learned_on_top_in_rl_and_in_sft(warm, first, tmp_path):
    again = train("Bandit", tmp_path, "again", num_rollout=1, hf_checkpoint=str(first), **LORA)
    config = json.loads((again.folder / "checkpoint" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (16, str(warm))
    (row,) = [row for row in metrics_of(again.folder) if "train/kl_loss" in row]
    assert row["train/kl_loss"] == pytest.approx(0.0, abs=1e-6), "the reference has the first adapters"
    assert row["train/train_rollout_logprob_abs_diff"] < 1e-5

    sft = {"sft_data": str(again.folder), "sft_batch_size": 16, "num_epoch": 1, "lora_rank": 4}
    place = {"inline": True, "output_dir": str(tmp_path), "name": "sft", "quiet": True}
    learned = agentrl.sft(hf_checkpoint=str(first), **sft, **place)
    config = json.loads((learned.folder / "checkpoint" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (12, str(warm))
