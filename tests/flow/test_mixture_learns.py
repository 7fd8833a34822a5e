"""A small mixture of experts on two ranks learns to search, and R3 takes away what other experts do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import agentrl
from agentrl.weights.hf.export import save_model
from agentrl.weights.hf.source import open_source
from tests.flow.runs import metrics_of
from tests.flow.test_families import EXPERTS_ON_TWO

RUN_FILE = Path(__file__).parents[2] / "examples/hop_search/run.toml"
MISMATCH, KL = "train/moe_router_mismatch", "train/train_rollout_kl_k3"
ROUTING = {"engine_dtype": "bfloat16", "return_routed_experts": True, "correction": "tis"}


def mixture(folder: Path, like: Path) -> Path:
    """The quickstart's model with eight experts, each half as wide as its MLP; a token takes two."""
    source = open_source(like)
    torch.manual_seed(0)
    dense = {k: v for k, v in source.config.to_dict().items() if k not in ("model_type", "architectures")}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    width = dense["intermediate_size"] // 2
    config = Qwen3MoeConfig(**{**dense, **experts, "moe_intermediate_size": width})
    save_model(Qwen3MoeForCausalLM(config), source.tokenizer, str(folder))
    return folder


@pytest.mark.learning
@pytest.mark.timeout(7200)
def test_a_mixture_on_two_ranks_learns_to_search_with_and_without_replay(tmp_path, capsys):
    common = {"quiet": True, "output_dir": str(tmp_path)}
    empty = {"warm_start_steps": 1, "num_rollout": 0, "num_demonstrations": 64, "eval_episodes": 1}
    tokens = agentrl.train(RUN_FILE, name="tokens", **common, **empty).folder / "checkpoint"
    fresh = str(mixture(tmp_path / "fresh", tokens))
    # Of mixtures the quickstart's learning rate makes none that calls the tool.
    warm = {"warm_start_lr": 3e-3, "num_rollout": 0}
    begun = agentrl.train(RUN_FILE, name="begun", **common, **warm, hf_checkpoint=fresh)
    before = begun.reports["after warm start"]["sampled"].mean
    assert before < 0.5
    model = {"hf_checkpoint": str(begun.folder / "checkpoint"), "warm_start_steps": 0}
    for replay in (None, "R3"):
        own = {"router_replay": replay, **EXPERTS_ON_TWO, **ROUTING}
        run = agentrl.train(RUN_FILE, name=f"{replay}", **common, **model, **own)
        rows = [row for row in metrics_of(run.folder) if KL in row]
        other, kl = (np.mean([row[name] for row in rows]) for name in (MISMATCH, KL))
        after = {mode: round(report.mean, 3) for mode, report in run.reports["after RL"].items()}
        with capsys.disabled():
            print(
                f"\n{replay}: sampled {before:.3f}, then {after}; {other:.2%} with other experts, KL {kl:.2e}"
            )
        assert after["sampled"] > before + 0.3
