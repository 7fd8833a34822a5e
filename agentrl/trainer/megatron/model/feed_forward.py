"""Norms and feed-forward blocks in place of Megatron's own, as few kernels."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, rms_norm, silu

from agentrl.losses import fused
from agentrl.trainer.megatron.model.shape import Gating


def mark_own_tokens(parameter: nn.Parameter, config: TransformerConfig) -> None:
    """Have the gradient of a parameter summed over the tensor ranks, where each has tokens of its own."""
    # Megatron's mark.
    vars(parameter)["sequence_parallel"] = config.sequence_parallel


def scaled(normed: Tensor, weight: Tensor, *, from_zero: bool) -> Tensor:
    """Normalised values, fp32, times the weights, in their dtype; as in Hugging Face's models.

    from_zero: times 1 more than the weights, and that in fp32 (Gemma).
    """
    if from_zero:
        return (normed * (1.0 + weight.float())).to(weight.dtype)
    return weight * normed.to(weight.dtype)


@fused
def _rms_norm(hidden: Tensor, weight: Tensor, eps: float, from_zero: bool) -> Tensor:
    normed = rms_norm(hidden.float(), (hidden.shape[-1],), eps=eps)
    return scaled(normed, weight, from_zero=from_zero)


class RMSNorm(nn.Module):
    """Root mean square norm in fp32, see `scaled`; also under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self._from_zero = config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        mark_own_tokens(self.weight, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape, over its last dimension."""
        return _rms_norm(hidden, self.weight, self.eps, self._from_zero)


class ReplicatedLinear(nn.Module):
    """A matrix that every tensor rank has all of, for its own tokens."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        mark_own_tokens(self.weight, config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape, over its last dimension."""
        return linear(hidden, self.weight)


class NormedRow(nn.Module):
    """A row-parallel layer whose output is normalised before it is added to the residual."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object
    ) -> None:
        super().__init__()
        self.linear = RowParallelLinear(input_size, output_size, config=config, **kwargs)
        self.norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """The output, and no bias: these families have none in this layer."""
        output, _ = self.linear(hidden)
        return self.norm(output), None


def row_settings(config: TransformerConfig, *, bias: bool = False) -> dict[str, object]:
    """The arguments of a row-parallel layer whose output, and bias, are added to the residual."""
    return {
        "init_method": config.output_layer_init_method,
        "bias": bias,
        "input_is_parallel": True,
        "skip_bias_add": True,
        "is_expert": False,
    }


def recomputes_attention(config: TransformerConfig) -> bool:
    """Whether what lies between the matrices of an attention is computed again for the backward pass."""
    return config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules


@fused
def gated(gate_up: Tensor, how: Gating) -> Tensor:
    """[..., 2 x width] -> [..., width]."""
    gate, up = gate_up.chunk(2, -1)
    if how.limit is not None:
        gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
        return gate * (how.alpha * gate).sigmoid() * (up + 1)
    return (silu(gate) if how.activation == "silu" else gelu(gate, approximate="tanh")) * up


class GatedMLP(nn.Module):
    """A feed-forward block: activation(gate) x up, as one kernel, between two matrices.

    width: channels between them; left out, the model's.
    """

    row: type = RowParallelLinear

    def __init__(
        self, config: TransformerConfig, gate: Gating, width: int | None = None, **_: object
    ) -> None:
        super().__init__()
        width = width or config.ffn_hidden_size
        self._gate = gate
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            2 * width,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        self.linear_fc2 = self.row(width, config.hidden_size, config=config, **row_settings(config))

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, Tensor | None]:
        """[t, 1, width] -> [t, 1, width], and no bias."""
        gate_up, _no_bias = self.linear_fc1(hidden_states)
        output: tuple[Tensor, Tensor | None] = self.linear_fc2(gated(gate_up, self._gate))
        return output


class NormedMLP(GatedMLP):
    """One whose output is normalised before it is added to the residual."""

    row = NormedRow
