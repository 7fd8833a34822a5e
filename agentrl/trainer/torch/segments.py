"""Attention inside sequences for transformers' models, through its attention registry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.errors import ModelLoadError
from agentrl.trainer.attention import Ends, Sides, fastest

_NAME = "agentrl_segments"


@contextmanager
def segment_attention(model: PreTrainedModel) -> Iterator[None]:
    """Make `model` attend within sequences; it must be called with `ends=`. Restored afterwards.

    Raises:
        ModelLoadError: the architecture does not support the attention registry.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        if model.config._attn_implementation != _NAME:
            raise ModelLoadError(
                f"{type(model).__name__} attends in its own way, so sequences cannot share a row; "
                "choose a Llama, Qwen2 or Qwen3 architecture."
            )
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_mask: Tensor | None,
    ends: Ends,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Query, key and value [1, heads, T, head_dim] -> [1, T, heads, head_dim]; transformers' signature."""
    # Under autocast norms and rotations give queries and keys in fp32.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return _kernel(value.device, value.dtype).attend(q, k, v, Sides(ends, ends), scaling)[None], None


# It looks for packages.
_kernel = lru_cache(maxsize=8)(fastest)

ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
