"""Runs on Ray with GPUs: servers and ranks that take turns, or have GPUs of their own; weights by NCCL."""

from __future__ import annotations

import os

import pytest
import torch

from agentrl.processes.config import ClusterConfig
from agentrl.processes.ray.session import connected
from tests.gpu.test_sglang import FURTHEST, GIVEN, ON_GPU
from tests.processes.test_servers_on_ray import over_megatron, serves_the_weights_of_a_rank
from tests.processes.test_train_on_ray import trains_on_sglang

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
ARGUMENTS = {**ON_GPU, "mem_fraction_static": 0.3}
SERVED = {"rollout_num_gpus_per_engine": 1, "sglang": ARGUMENTS}
# The torch trainer computes on the CPU, so a server has the one GPU for itself.
APART = ["torch", *(["megatron"] if NUM_GPUS > 1 else [])]
ON_TWO_GPUS = GIVEN if NUM_GPUS > 1 else []


@pytest.mark.parametrize("agentrl_sglang_python", GIVEN)
@pytest.mark.parametrize("trainer", ["torch", "megatron"])
def test_engine_and_trainer_take_turns_on_one_gpu(tmp_path, trainer, agentrl_sglang_python):
    log = trains_on_sglang(tmp_path, "Talkative", trainer=trainer, colocate=True, **SERVED)
    assert "device='cuda'" in log
    assert "dtype='bfloat16'" in log


@pytest.mark.parametrize("agentrl_sglang_python", GIVEN)
@pytest.mark.parametrize("trainer", APART)
def test_engine_and_trainer_have_gpus_of_their_own(tmp_path, trainer, agentrl_sglang_python):
    log = trains_on_sglang(tmp_path, "Talkative", trainer=trainer, **SERVED)
    assert "device='cuda'" in log


@pytest.mark.parametrize("agentrl_sglang_python", ON_TWO_GPUS)
async def test_a_rank_sends_its_weights_from_its_gpu_to_that_of_a_server(tmp_path, agentrl_sglang_python):
    with connected(ClusterConfig(cluster="ray"), tmp_path / "run", os.environ) as session:
        await serves_the_weights_of_a_rank(session, tmp_path, over_megatron, "nccl", 1, FURTHEST, **ARGUMENTS)
