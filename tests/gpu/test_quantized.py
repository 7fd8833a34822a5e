"""SGLang on a GPU takes the weights of every version in block fp8, and samples what they stand for."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file

import agentrl
from agentrl.weights.hf.casting import cast_directory
from tests.flow.runs import metrics_of
from tests.trainer.tiny import tokenizer
from tests.weights.hf.quantizing import model_of

pytestmark = pytest.mark.gpu
GIVEN = [python] if (python := os.environ.get("AGENTRL_SGLANG_PYTHON")) else []
"""The interpreter of an SGLang that is built for GPUs. What `make sglang-cpu` installs is for the CPU."""
MISMATCH = "train/train_rollout_logprob_abs_diff"
FURTHEST = 0.1
"""The mean difference of logprobs: activations are in fp8, too. In bfloat16 alone it is 0.008."""
TRANSPORTS = ["tensor", "distributed", "disk", "delta"]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize("agentrl_sglang_python", GIVEN)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_run_in_fp8_publishes_what_the_server_then_holds(tmp_path, kind, transport, agentrl_sglang_python):
    words = tokenizer()
    model_of(kind, vocab_size=len(words), **SIZES).bfloat16().save_pretrained(tmp_path / "plain")
    words.save_pretrained(tmp_path / "plain")
    cast_directory(tmp_path / "plain", tmp_path / "fp8", "fp8")
    # Every transport but that of tensor parallel servers reads the weights back, or the update fails.
    run = agentrl.train(
        env="tests.flow.worlds:Talkative",
        hf_checkpoint=str(tmp_path / "fp8"),
        output_dir=str(tmp_path),
        device="cuda",
        engine="sglang",
        sglang_python=agentrl_sglang_python,
        rollout_num_gpus_per_engine=1,
        update_weights_transport=transport,
        sglang={"attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.3},
        warm_start_steps=0,
        num_rollout=3,
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        eval_episodes=4,
        eval_interval=100,
        use_tensorboard=False,
        quiet=True,
    )
    rows = [row[MISMATCH] for row in metrics_of(run.folder) if MISMATCH in row]
    assert len(rows) == 3
    assert all(1e-4 < row < FURTHEST for row in rows)
    log = next(run.folder.glob("engine/**/server-0.log")).read_text()
    assert "fp8" in log
    saved = load_file(run.folder / "checkpoint" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} <= {torch.bfloat16, torch.float32}
