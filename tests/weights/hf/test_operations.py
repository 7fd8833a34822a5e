"""The operations of a model are those that torch counts in its forward pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from agentrl.weights.hf.source import Operations
from tests.trainer.families import FAMILIES, family

EXPERTS = {"glm4_moe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"}
WINDOWS = {
    *("cohere2", "exaone4", "gemma2", "gemma2_caps", "gemma3"),
    *("mistral_window", "olmo3", "qwen2_window"),
}
NOT_COUNTED = EXPERTS | {"falcon_h1", "lfm2", "mamba2", "qwen3_5", *WINDOWS}


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_are_those_that_torch_counts(name):
    """Torch counts attention to all tokens, also to later ones."""
    model = family(name)
    operations = Operations.of(model.config)
    if operations is None:
        assert name in NOT_COUNTED
        return
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 48, dtype=torch.int64), use_cache=False)
    counted = counter.get_total_flops()
    # StableLM's own code multiplies a little more.
    assert operations.forward([48], 48, causal=False) == pytest.approx(
        counted, rel=0.06 if name == "stablelm" else 2e-3
    )


def test_causal_attention_needs_half_of_the_operations():
    scores = Operations(matrices=0, head=0, scores=8)
    assert scores.forward([1000], 0) == pytest.approx(scores.forward([1000], 0, causal=False) / 2, rel=2e-3)
