"""The experts of each token by brute force: the model runs on every prefix by itself, without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.types import Completion, RoutedArray


def routers_in(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


@torch.no_grad()
def routes_of(model: PreTrainedModel, ids: Sequence[int]) -> RoutedArray:
    """[T, layers, k], sorted: those of the last token of each prefix."""
    seen: list[torch.Tensor] = []
    handles = [
        router.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs[2][-1]))
        for router in routers_in(model)
    ]
    rows = []
    for end in range(1, len(ids) + 1):
        seen.clear()
        model(torch.tensor([list(ids[:end])]), use_cache=False)
        rows.append(torch.stack(seen).sort(-1).values.numpy())
    for handle in handles:
        handle.remove()
    return np.stack(rows).astype(np.int16)


def expect_routes(
    model: PreTrainedModel, prompt: Sequence[int], completion: Completion, start: int = 0, unknown: int = 1
) -> None:
    """The completion has the experts of the prompt from `start` on, and of all but the last sampled ones."""
    expected = routes_of(model, [*prompt, *completion.token_ids.tolist()])
    of_prompt = completion.prompt_extras["routed_experts"]
    sampled = completion.extras["routed_experts"]
    assert (of_prompt.values.dtype, of_prompt.fill, sampled.spec) == (np.int16, -1, of_prompt.spec)
    np.testing.assert_array_equal(np.sort(of_prompt.values, -1), expected[start : len(prompt)])
    size = len(completion.token_ids) - unknown
    np.testing.assert_array_equal(np.sort(sampled.values[:size], -1), expected[len(prompt) :][:size])
    assert (sampled.values[size:] == -1).all()
