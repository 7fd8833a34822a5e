"""Whole runs of families that the embedded engine has no table for, from a directory to a directory."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3MoeConfig

from agentrl.weights.hf.source import open_source
from tests.flow.runs import SHAPE, WARM, metrics_of, train

SIZES = {
    "vocab_size": SHAPE["vocab_size"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "gemma2": Gemma2Config(**SIZES, sliding_window=8, query_pre_attn_scalar=32),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
}

EXPERTS_ON_TWO = {"trainer": "megatron", "actor_num_gpus_per_node": 2, "expert_model_parallel_size": 2}
RUNS = {
    "gemma2": ("gemma2", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "experts on two ranks": ("qwen3_moe", EXPERTS_ON_TWO),
}


def tensors_in(folder):
    """The file and the shape of each."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            names = opened.keys()
            found |= {name: (path.name, tuple(opened.get_slice(name).get_shape())) for name in names}
    return found


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """The tokenizer of the run's world."""
    settings = {"num_rollout": 0, "warm_start_steps": 1, "num_demonstrations": 8, "eval_episodes": 1}
    run = train("Bandit", tmp_path_factory.mktemp("runs"), "tokens", **settings)
    return open_source(run.folder / "checkpoint").tokenizer


@pytest.mark.parametrize("case", RUNS)
def test_it_learns_from_a_directory_and_saves_what_it_was_given(case, tokens, tmp_path, capsys):
    name, layout = RUNS[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    tokens.save_pretrained(tmp_path / "model")
    run = train(
        *("Bandit", tmp_path, name),
        **{**WARM, "hf_checkpoint": str(tmp_path / "model"), "num_rollout": 3, "eval_interval": 3},
        **layout,
        quiet=False,
    )
    rows = [row for row in metrics_of(run.folder) if "train/loss" in row]
    assert len(rows) == 3
    assert all(row["rollout/raw_reward"] > 0.1 for row in rows), "the warm start has taught it the form"
    said = "".join(capsys.readouterr())
    assert "trains in batches of sequences of like length" in said or name != "gemma2"
    assert f"decodes `{name}` by transformers' own code" in said
    # What the engine sampled with is what the trainer computes.
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
    files = tensors_in(tmp_path / "model")
    assert len({file for file, _ in files.values()}) > 2
    assert tensors_in(run.folder / "checkpoint") == files
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "model", run.folder / "checkpoint")
    )
    assert all(not torch.equal(before[key], after[key]) for key in before)
