"""The operations of a model are those that torch counts in its forward pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from agentrl.weights.hf.source import Operations
from agentrl.weights.hf.tensors import num_parameters
from tests.sizes import DEEPSEEK_V3, GLM45_AIR, QWEN3_30B_A3B, opened
from tests.trainer.families import FAMILIES, family
from tests.trainer.megatron.models import MIXTURES, model_of

WINDOWS = {
    *("cohere2", "exaone4", "gemma2", "gemma2_caps", "gemma3"),
    *("mistral_window", "olmo3", "qwen2_window"),
}
NOT_COUNTED = {
    "falcon_h1",
    "gpt_oss",
    "lfm2",
    "mamba2",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_next",
    *WINDOWS,
}


def counted(model):
    """What torch counts of 48 tokens; attention to all of them, also to later ones."""
    model.set_attn_implementation("eager")
    # The counter knows no grouped products: here each expert multiplies its own tokens.
    model.config._experts_implementation = "eager"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 48, dtype=torch.int64), use_cache=False)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_are_those_that_torch_counts(name):
    model = family(name)
    operations = Operations.of(model.config)
    if operations is None:
        assert name in NOT_COUNTED
        return
    # StableLM's own code multiplies a little more.
    assert operations.forward([48], 48, causal=False) == pytest.approx(
        counted(model), rel=0.06 if name == "stablelm" else 2e-3
    )


@pytest.mark.parametrize("kind", sorted(MIXTURES - NOT_COUNTED))
def test_of_experts_those_count_that_a_token_goes_through(kind):
    model = model_of(kind)
    operations = Operations.of(model.config)
    assert operations.forward([48], 48, causal=False) == pytest.approx(counted(model), rel=1e-9)


# In billions, as the models' authors publish them: arXiv:2505.09388, arXiv:2508.06471, arXiv:2412.19437.
PUBLISHED = {
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30.5, 3.3),
    "GLM-4.5-Air": (GLM45_AIR, 106, 12),
    "DeepSeek-V3": (DEEPSEEK_V3, 671, 37),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_the_parameters_that_are_published(name):
    """Active are those of the matrices that a token goes through; authors count the embedding or not."""
    config, total, active = PUBLISHED[name]
    model = opened(config)
    assert num_parameters(model) / 1e9 == pytest.approx(total, rel=0.01)
    operations = Operations.of(model)
    without, with_embedding = operations.matrices, operations.matrices + 2 * operations.head
    assert 0.98 * without <= active * 1e9 <= 1.01 * with_embedding


def test_causal_attention_needs_half_of_the_operations():
    scores = Operations(matrices=0, head=0, scores=8)
    assert scores.forward([1000], 0) == pytest.approx(scores.forward([1000], 0, causal=False) / 2, rel=2e-3)
