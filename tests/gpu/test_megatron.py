"""Megatron over NCCL: the same equality with transformers, on as many ranks as there are GPUs."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.megatron.model.kernels import fastest
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
