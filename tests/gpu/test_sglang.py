"""SGLang on a GPU: the same promises, in fp32."""

from __future__ import annotations

import os

import pytest
import torch

from agentrl.engine.conformance import CHECKS
from tests.engine.fleets import sglang_fleet
from tests.engine.test_conformance_fleet import FLEET_CAPS, keeps_all, subject_of
from tests.engine.test_fleet import publish, start_request

pytestmark = pytest.mark.gpu
GIVEN = [python] if (python := os.environ.get("AGENTRL_SGLANG_PYTHON")) else []
"""The interpreter of an SGLang that is built for GPUs. What `make sglang-cpu` installs is for the CPU."""
ON_GPU = {"attention_backend": "triton", "sampling_backend": "pytorch", "dtype": "float32"}
TOLERANCE = 1e-3
"""Kernels sum in another order, and may multiply in TF32."""


@pytest.mark.parametrize("agentrl_sglang_python", GIVEN)
async def test_a_server_on_a_gpu_keeps_its_promises_under_new_weights(tmp_path, agentrl_sglang_python):
    async with sglang_fleet(
        tmp_path, 1, device="cuda", context_len=2048, mem_fraction_static=0.3, **ON_GPU
    ) as fleet:
        await keeps_all(subject_of(fleet, FLEET_CAPS, 2046, TOLERANCE), CHECKS[:-1])
        assert fleet.incidents == []


@pytest.mark.parametrize("agentrl_sglang_python", GIVEN)
async def test_released_memory_is_free_on_the_card(tmp_path, agentrl_sglang_python):
    arguments = {**ON_GPU, "mem_fraction_static": 0.3, "enable_memory_saver": True}
    async with sglang_fleet(tmp_path, 1, device="cuda", context_len=2048, **arguments) as fleet:
        before, _ = torch.cuda.mem_get_info()
        await fleet.release_memory(("weights", "kv_cache"))
        assert torch.cuda.mem_get_info()[0] - before > 1 << 20
        await fleet.resume_memory(("weights",))
        await publish(fleet, 1)
        await fleet.resume_memory(("kv_cache",))
        _, request = start_request(fleet, 1, new=8)
        assert (await request).versions.tolist() == [1] * 8
