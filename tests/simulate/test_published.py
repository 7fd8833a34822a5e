"""Whole steps of RL that NVIDIA published for NeMo RL, simulated from run files with the same layouts.

NVIDIA-NeMo/RL v0.6.0: docs/about/performance-summary.md (GRPO, DGX H100, bfloat16, means of five steps), and
the recipes that it names, in examples/configs/recipes/llm/performance: batches, layouts, what is recomputed,
rows as long as a sequence may be, a pass for old and one for reference logprobs. Of lengths the mean and the
maximum are published; here they are lognormal, with that mean, and 5% of them beyond the maximum. How long
weights are sent is not published: each GPU gets all of them at the 50 GB/s of its network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import tomli_w

from agentrl.cli import main
from agentrl.types import JSON
from agentrl.weights.hf.tensors import num_parameters
from tests.sizes import DEEPSEEK_V3, QWEN3_30B_A3B, QWEN3_235B_A22B, opened

NETWORK = 50e9
PROMPT = 120


class Step(NamedTuple):
    """A published step. playing, training: GPUs; all = they take turns on the same ones. server: GPUs of one.
    ahead: steps that tokens may be older. batch: prompts, samples of each, optimizer steps. most: tokens of a
    sequence; sampled: their median without the prompt. seconds: published."""

    model: Mapping[str, JSON]
    playing: int
    training: int
    server: int
    ahead: int
    batch: tuple[int, int, int]
    most: int
    sampled: int
    layout: Mapping[str, JSON]
    seconds: float

    @property
    def run(self) -> dict[str, dict[str, JSON]]:
        """The run file."""
        (prompts, samples, steps), servers = self.batch, self.playing // self.server
        rollout = {"rollout_batch_size": prompts, "n_samples_per_prompt": samples}
        common = {"actor_num_nodes": self.training // 8, "actor_num_gpus_per_node": 8}
        return {
            "env": {"env": "SingleTurn-v0", "reward": "exact_match"},
            "model": {"hf_checkpoint": "model"},
            "rollout": {**rollout, "num_steps_per_rollout": steps, "max_staleness": self.ahead},
            "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.01, "correction": "tis"},
            "trainer": {
                "trainer": "megatron",
                "bf16": True,
                "colocate": not self.ahead,
                "max_tokens_per_gpu": self.most,
            },
            "layout": {**common, "expert_tensor_parallel_size": 1, **self.layout},
            "engine": {
                "engine": "sglang",
                "rollout_num_engines": servers,
                "rollout_num_gpus_per_engine": self.server,
                "max_slots": 256 * servers,
            },
        }


EP8 = {"expert_model_parallel_size": 8}
QWEN_235B = {
    "sequence_parallel": True,
    "expert_model_parallel_size": 16,
    "pipeline_model_parallel_size": 8,
    "decoder_first_pipeline_num_layers": 11,
    "decoder_last_pipeline_num_layers": 11,
    "recompute_granularity": "full",
}
TP2_CP2 = {**QWEN_235B, "tensor_model_parallel_size": 2, "context_parallel_size": 2}
DEEPSEEK = {
    "expert_model_parallel_size": 16,
    "pipeline_model_parallel_size": 16,
    "decoder_first_pipeline_num_layers": 3,
    "decoder_last_pipeline_num_layers": 2,
    "recompute_granularity": "full",
}
SMALL, MIDDLE, LARGE = (64, 32, 4), (16, 32, 1), (32, 16, 1)
STEPS = {
    "Qwen3-30B-A3B, 32": Step(QWEN3_30B_A3B, 32, 32, 2, 0, SMALL, 4096, 3050, EP8, 192),
    "Qwen3-30B-A3B, 16 + 16, one step": Step(
        *(QWEN3_30B_A3B, 16, 16, 2, 1, SMALL, 4096, 3050),
        {**EP8, "pipeline_model_parallel_size": 2},
        152,
    ),
    "Qwen3-30B-A3B, 64 + 128, eight steps": Step(QWEN3_30B_A3B, 64, 128, 2, 8, SMALL, 4096, 3050, EP8, 34.5),
    "Qwen3-235B-A22B, 128": Step(QWEN3_235B_A22B, 128, 128, 16, 0, MIDDLE, 8192, 5440, TP2_CP2, 395),
    "Qwen3-235B-A22B, 256": Step(QWEN3_235B_A22B, 256, 256, 16, 0, MIDDLE, 8192, 5440, TP2_CP2, 312),
    "Qwen3-235B-A22B, 128 + 128, one step": Step(
        *(QWEN3_235B_A22B, 128, 128, 8, 1, MIDDLE, 8192, 5440),
        {**QWEN_235B, "tensor_model_parallel_size": 4},
        231,
    ),
    "DeepSeek-V3, 256": Step(DEEPSEEK_V3, 256, 256, 32, 0, LARGE, 1536, 480, DEEPSEEK, 134),
    "DeepSeek-V3, 512": Step(DEEPSEEK_V3, 512, 512, 32, 0, LARGE, 1536, 480, DEEPSEEK, 111),
    "DeepSeek-V3, 256 + 256, one step": Step(DEEPSEEK_V3, 256, 256, 32, 1, LARGE, 1536, 480, DEEPSEEK, 64.1),
}
QUICK = ("Qwen3-235B-A22B, 128", "DeepSeek-V3, 256", "DeepSeek-V3, 256 + 256, one step")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in STEPS]
)
def test_a_published_step_is_simulated_within_30_percent(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    step = STEPS[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(step.model))
    (tmp_path / "run.toml").write_text(tomli_w.dumps(step.run))
    given = {
        **dict.fromkeys(("turns", "turns-p95"), 1),
        **dict.fromkeys(("prompt-len", "prompt-len-p95"), PROMPT),
        **dict.fromkeys(("env-s", "env-s-p95"), 0),
        "turn-len": step.sampled,
        "turn-len-p95": step.most - PROMPT,
        "publish-s": 2 * num_parameters(opened(step.model)) / NETWORK,
        "iterations": 5 + 6 * step.ahead,
    }
    main(["simulate", "run.toml", *(f"--{flag}={value}" for flag, value in given.items()), "--json"])
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    error = row["step_s"] / step.seconds - 1
    with capsys.disabled():
        print(f"\n{name}: {row['step_s']:.1f} s, published {step.seconds} s ({error:+.0%})")
    assert abs(error) < 0.3
