"""What each layer's attention looks at, by a checkpoint's config: its window, and its rotary positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentrl.errors import ModelLoadError

_ROPES = ("linear", "llama3", "yarn")
"""Scaled rotary positions that are the same for every sequence."""
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


class Rotary(NamedTuple):
    """Rotary positions: the angle of each pair of channels for one position; scale: of both waves."""

    angles: tuple[float, ...]
    scale: float


class LayerAttention(NamedTuple):
    """window: tokens that one attends to, itself included; None = all before it.

    is_linear: a state that each token changes stands for all before it; it has no positions.
    """

    rotary: Rotary
    window: int | None = None
    is_linear: bool = False


def attention_of(
    config: PretrainedConfig, *, has_windows: bool, has_linear: bool = False
) -> tuple[LayerAttention, ...]:
    """That of each layer. has_windows, has_linear: the family's layers may have such.

    Raises:
        ModelLoadError: layers have windows and the family none, or positions that Megatron does not have.
    """
    fields = config.to_dict()
    whole = _SLIDING if fields.get("sliding_window") else _FULL
    kinds = [str(kind) for kind in fields.get("layer_types") or [whole] * int(fields["num_hidden_layers"])]
    known = {_FULL} | ({_SLIDING} if has_windows else set()) | ({_LINEAR} if has_linear else set())
    if not {*kinds} <= known:
        raise ModelLoadError(
            f"this {config.model_type} has windows of attention, which its table in families.py does not; "
            "train it with trainer = torch."
        )
    # Some families have other positions in layers of another kind.
    nested = any(kind in config.rope_parameters for kind in kinds)
    by_kind = {
        kind: LayerAttention(
            _rotary(config, kind if nested else None),
            int(fields["sliding_window"]) if kind == _SLIDING else None,
            kind == _LINEAR,
        )
        for kind in {*kinds}
    }
    return tuple(by_kind[kind] for kind in kinds)


def _rotary(config: PretrainedConfig, layer_type: str | None) -> Rotary:
    """Those of transformers' own models, by its own functions."""
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = rope.get("rope_type", "default")
    if kind in _ROPES:
        angles, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), layer_type=layer_type)
        return Rotary(tuple(angles.tolist()), float(scale))
    if kind != "default":
        raise ModelLoadError(
            f"this {config.model_type} scales its rotary positions in a way that Megatron does not "
            f"(`{kind}`); train it with trainer = torch."
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(head * float(rope.get("partial_rotary_factor", 1.0)))
    angles = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    return Rotary(tuple(angles.tolist()), 1.0)
