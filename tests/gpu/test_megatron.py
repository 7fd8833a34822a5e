"""Megatron over NCCL: the same equality with transformers, on as many ranks as there are GPUs."""

from __future__ import annotations

import pytest
import torch

import agentrl
from agentrl.trainer.megatron.model.kernels import fastest
from tests.engine.serving import sglang_python
from tests.flow.runs import metrics_of
from tests.flow.test_megatron import HOP_SEARCH
from tests.gpu.test_sglang import ON_GPU
from tests.trainer.megatron.models import CONFIGS
from tests.trainer.megatron.test_equality import PAIRS, check
from tests.trainer.megatron.test_kernels import SCALE, alone, drawn
from tests.trainer.megatron.together import Ranks

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-4
"""Kernels sum in another order; TF32 is off unless somebody switched it on."""


@pytest.fixture(scope="module")
def ranks():
    with Ranks(min(torch.cuda.device_count(), 2)) as ranks:
        yield ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fastest_attention_is_each_sequence_by_itself(dtype):
    row = drawn(dtype, "cuda")
    kernel = fastest(torch.device("cuda"), dtype)
    print(kernel.name)
    torch.testing.assert_close(kernel.attend(*row, SCALE).double(), alone(*row, SCALE), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_gpu_is_transformers(ranks, kind):
    check(ranks, kind, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", PAIRS)
def test_two_gpus_are_transformers(ranks, name):
    layout = PAIRS[name] if ranks.count == 2 else {}
    check(ranks, "qwen3", tolerance=TOLERANCE, **layout)


def test_hop_search_is_learned_on_one_card_with_sglang(tmp_path):
    engine = {
        "engine": "sglang",
        "rollout_num_gpus_per_engine": 1,
        "sglang": {**ON_GPU, "mem_fraction_static": 0.3},
        "sglang_python": str(sglang_python()),
    }
    result = agentrl.train(HOP_SEARCH, quiet=True, output_dir=str(tmp_path), trainer="megatron", **engine)
    assert result.reports["after RL"]["greedy"].mean > 0.98
    rows = [row for row in metrics_of(result.folder) if "train/loss" in row]
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in rows) < 1e-2
