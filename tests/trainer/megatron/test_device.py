"""Megatron alone is told that there is a GPU, and a version that asks for more is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import shape_of
from agentrl.trainer.plan import Learning
from tests.trainer.megatron.equality import part_of, share_of
from tests.trainer.megatron.models import checkpoint_of, model_of
from tests.trainer.megatron.test_losses import LOSSES, batch
from tests.trainer.megatron.together import Ranks
from tests.trainer.tiny import settings

EXPECTED = Path(__file__).parent / "queries.txt"

SCRIPT = """
import torch
from agentrl.trainer.megatron.device import queries, emulate_cuda
before = torch.ones
assert emulate_cuda() is not torch.cuda.is_available()
assert emulate_cuda() is not torch.cuda.is_available(), "twice is once"
if torch.cuda.is_available():
    assert torch.ones is before and not queries
    raise SystemExit
namespace = {"__name__": "megatron.core.somewhere", "torch": torch}
asking = "device, ones = torch.cuda.current_device(), torch.ones(2, device='cuda', pin_memory=True)"
asking += "\\nkind, same, half = ones.type(), ones.cuda() is ones, ones.type(torch.float16).dtype"
exec(asking, namespace)
assert namespace["device"] == torch.device("cpu"), namespace
assert namespace["kind"] == "torch.cuda.FloatTensor"
assert namespace["same"] and namespace["half"] == torch.float16
for question in ("torch.cuda.current_device()", "torch.ones(2, device='cuda')", "torch.ones(2).cuda()"):
    try:
        eval(question)
    except (AssertionError, RuntimeError):
        continue
    raise SystemExit(f"{question} was answered for a stranger")
assert torch.ones(2).type() == "torch.FloatTensor"
print(sorted(key for key in queries if "somewhere" in key))
"""


@pytest.mark.full
def test_only_megatron_is_told_of_a_gpu():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "torch.cuda.current_device in megatron.core.somewhere" in done.stdout
    ) is not torch.cuda.is_available()


def step_of(layout: MegatronConfig, _rank: int, bf16: bool) -> dict[str, int]:
    """Runs in a rank: a step of the optimizer; whom it needed an answer for."""
    from agentrl.trainer.megatron.device import queries
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    model, train_batch = model_of("glm4"), batch("token mean")
    network = Network(shape_of(model.config), layout, bf16=bf16)
    network.load(checkpoint_of(model).__getitem__)
    learner = MegatronLearner(network, logprobs_of, Learning(LOSSES["grpo"], settings(bf16=bf16), 10))
    learner.learn(share_of(layout, train_batch.samples), train_batch)
    return dict(queries)


@pytest.mark.full
def test_no_place_in_megatron_needs_an_answer_that_is_not_known():
    layouts = [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "full"},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        {"context_parallel_size": 2},
    ]
    queries: set[str] = set()
    with Ranks(2) as ranks:
        for sizes in layouts:
            parts = ranks.run(part_of, MegatronConfig(actor_num_gpus_per_node=2, **sizes), "glm4")
            queries |= {key for part in parts for key in part.queries}
        for distributed, bf16 in ((True, True), (False, True), (True, False), (False, False)):
            layout = MegatronConfig(actor_num_gpus_per_node=2, use_distributed_optimizer=distributed)
            queries |= {key for keys in ranks.run(step_of, layout, bf16) for key in keys}
    queries -= {"emulating"}
    expected = (
        set(EXPECTED.read_text(encoding="utf-8").split("\n")) - {""}
        if not torch.cuda.is_available()
        else set()
    )
    assert queries == expected, "read what is new in Megatron, then write it into queries.txt"
