"""`trainer = "megatron"` is all that changes: an agent learns on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

import agentrl
from agentrl.errors import ConfigError, UserError
from agentrl.processes.gpus import check_gpus
from agentrl.records import reconcile
from agentrl.weights.hf.export import save_model
from tests.flow.runs import WARM, metrics_of, train
from tests.trainer.megatron.models import SIZES, model_of
from tests.trainer.tiny import tokenizer

HOP_SEARCH = Path(__file__).parents[2] / "examples/hop_search/run.toml"
ON_TWO = {"trainer": "megatron", "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2}
# Two ranks share a head only where there are two of keys and values.
SETTINGS = {**WARM, **ON_TWO, "num_query_groups": 2}


@pytest.mark.full
def test_an_agent_learns_on_two_ranks(tmp_path):
    result = train(
        "Bandit", tmp_path, "x", num_rollout=8, use_kl_loss=True, kl_loss_coef=0.01, use_tis=True, **SETTINGS
    )
    before, after = (result.reports[at]["sampled"].mean for at in ("after warm start", "after RL"))
    assert before < 0.5
    assert after > 0.75
    rows = [row for row in metrics_of(result.folder) if "train/loss" in row]
    assert len(rows) == 8
    # In fp32 the ranks see what the engine saw, before every update.
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < 1e-4
    assert all(row["train/kl_loss"] >= 0 for row in rows)
    assert reconcile(result.folder).problems == ()
    assert (result.folder / "trainer" / "rank-1.log").exists()


@pytest.mark.learning
def test_an_agent_learns_with_a_critic_in_bf16_while_networks_rest(tmp_path):
    layout = {**SETTINGS, "tensor_model_parallel_size": 1, "offload": True, "bf16": True}
    algorithm = {"advantage_estimator": "ppo", "use_kl_loss": True, "kl_loss_coef": 0.01, "critic_lr": 3e-3}
    result = train("Bandit", tmp_path, "x", num_rollout=8, num_critic_only_steps=1, **algorithm, **layout)
    before, after = (result.reports[at]["sampled"].mean for at in ("after warm start", "after RL"))
    assert before < 0.5
    assert after > 0.75
    rows = [row for row in metrics_of(result.folder) if "train/value_loss" in row]
    assert len(rows) == 8
    assert "train/loss" not in rows[0]
    assert rows[-1]["train/value_loss"] < rows[0]["train/value_loss"]
    assert reconcile(result.folder).problems == ()


@pytest.mark.learning
def test_hop_search_is_learned_as_well_as_in_one_process(tmp_path):
    result = agentrl.train(HOP_SEARCH, quiet=True, output_dir=str(tmp_path), **ON_TWO)
    scores = {mode: report.mean for mode, report in result.reports["after RL"].items()}
    assert result.reports["after warm start"]["sampled"].mean < 0.45
    assert scores["sampled"] > 0.9
    assert scores["greedy"] > 0.98
    assert result.reports["after RL"]["greedy"].by["hops=2"] > 0.98


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"freeze_params_name_list": ["q_proj"]}, "v_proj.weight as one parameter, of which only_train_"),
        ({"lora_rank": 8}, "megatron has no adapters: drop lora_rank, or choose trainer = torch"),
        (
            {"num_query_groups": 1},
            "tensor_model_parallel_size = 2 does not divide the model's 1 heads of keys",
        ),
        (
            {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
            "the model's 1 layers are not shared out evenly over pipeline_model_parallel_size = 2",
        ),
        ({"megatron_config": {"num_layers": 7}}, "megatron_config says num_layers = 7, the checkpoint has 1"),
        ({"actor_num_gpus_per_node": 3}, "actor_num_gpus_per_node = 3 must be a multiple"),
    ],
)
def test_what_megatron_does_not_do_is_told_before_anything_is_played(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        train("Bandit", tmp_path, "x", num_rollout=1, **{**SETTINGS, **settings})
    assert not (tmp_path / "x" / "trajectories").exists()


def few_heads(folder):
    save_model(Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "num_key_value_heads": 1})), tokenizer(), str(folder))


def of_no_family(folder):
    save_model(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2)), tokenizer(), str(folder))


def without_a_tensor(folder):
    other_words(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def other_words(folder):
    save_model(model_of("qwen3"), tokenizer(), str(folder))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (few_heads, "does not divide the model's 1 heads of keys and values; lower it"),
        (of_no_family, "no table for models of type `gpt2`"),
        (without_a_tensor, "has no tensor model.norm.weight; is it a whole model"),
        (other_words, "has another vocabulary than the policy"),
    ],
)
def test_a_reference_that_no_rank_can_read_is_told_before_anything_is_played(tmp_path, make, message):
    make(tmp_path / "ref")
    judged = {"use_kl_loss": True, "ref_load": str(tmp_path / "ref")}
    with pytest.raises(UserError, match=message):
        train("Bandit", tmp_path, "x", num_rollout=1, **SETTINGS, **judged)
    assert not (tmp_path / "x" / "trajectories").exists()
    assert not (tmp_path / "x" / "trainer" / "rank-0.log").exists()


def test_each_rank_needs_a_gpu_of_its_own_where_there_are_any(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(
        ConfigError, match="has 2 ranks, each with a GPU of its own, and this machine has 1; "
    ):
        train("Bandit", tmp_path, "x", num_rollout=1, **SETTINGS)
    assert not (tmp_path / "x" / "trajectories").exists()
    # Where they are hidden, ranks train on the CPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpus(2)
