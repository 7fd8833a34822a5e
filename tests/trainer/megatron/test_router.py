"""Routers in bf16 against the formula in float64: logits as the model rounds them, or in fp32 by setting."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import shape_of
from tests.trainer.megatron.models import model_of

TOKENS = 400


def routed(layout, _rank, kind, tokens_tH):
    """Runs in a rank: the experts and weights of the tokens, by a router with weights at random."""
    from agentrl.trainer.megatron.model.experts import TopKRouter
    from agentrl.trainer.megatron.model.network import transformer_config

    config = transformer_config(shape_of(model_of(kind).config), layout, bf16=True)
    router = TopKRouter(config, has_bias=kind == "gpt_oss")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        chosen = router(tokens_tH, None, 0)
    bias = None if router.bias is None else router.bias.detach()
    return chosen.experts_tk, chosen.weights_tk, router.weight.detach(), bias


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"])
def test_logits_are_those_of_the_model_or_of_fp32(single, kind):
    tokens_tH = torch.randn(TOKENS, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = {}
    for dtype in (None, "fp32"):
        fields = {} if dtype is None else {"moe_router_dtype": dtype}
        [result] = single.run(routed, MegatronConfig(megatron_config=fields), kind, tokens_tH)
        experts_tk, weights_tk, weight, bias = result
        logits_tE = tokens_tH.double() @ weight.double().T + (0 if bias is None else bias.double())
        if dtype is None:
            # A sum that is rounded at another place of the last bit is a tie, and no other choice.
            logits_tE = logits_tE.bfloat16().double()
        probs_tE = logits_tE.softmax(-1)
        best_tk = probs_tE.topk(experts_tk.shape[1], -1).values
        of_chosen = probs_tE.gather(1, experts_tk)
        tolerance = 1e-6 if dtype else 2e-2
        torch.testing.assert_close(
            of_chosen.sort(-1, descending=True).values, best_tk, rtol=tolerance, atol=0
        )
        if getattr(model_of(kind).config, "norm_topk_prob", True):
            of_chosen = of_chosen / of_chosen.sum(-1, keepdim=True)
        assert weights_tk.dtype == torch.float32
        torch.testing.assert_close(weights_tk.double(), of_chosen, rtol=tolerance, atol=1e-7)
        results[dtype] = weights_tk
    # Rounded to eight bits, they are others.
    assert (results[None] - results["fp32"]).abs().max() > 1e-3
