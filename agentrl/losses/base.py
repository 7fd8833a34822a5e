"""The inputs of a loss and its result. N: the loss tokens of one micro-batch, S: its sequences."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from agentrl.losses.gpu import to_device
from agentrl.types import UNCHANGED, Coefficients, Extra, ExtraSpec

ROUNDING = 1e-4
"""How far the logprobs of two passes over the same weights may be apart (nats), in fp32 or better: their sums
are in another order."""
ROUNDING_BF16 = 0.02
"""The same in bf16."""


class TokenOutputs(NamedTuple):
    """The model's outputs at each loss token.

    entropy_N (nats) carries a gradient only with `logprobs_and_entropy(..., entropy_gradient=True)`.
    values_N: the critic's prediction before the token, in units of reward; None without a critic.
    sum_pi_squared_N: the sum of the squared probabilities of all tokens; None where a gradient is computed.
    """

    logp_N: Tensor
    entropy_N: Tensor
    values_N: Tensor | None = None
    sum_pi_squared_N: Tensor | None = None


class TokenExtra(NamedTuple):
    """An extra array of the loss tokens, see `agentrl.types.Extra`.

    values: dense: [N, *shape]. Ragged: the values of token n are values[offsets[n]:offsets[n + 1]].
    offsets: int64 [N + 1] where ragged, else None.
    """

    values: Tensor
    offsets: Tensor | None = None

    @classmethod
    def of(cls, extra: Extra, device: torch.device | str = "cpu") -> TokenExtra:
        """The arrays of an extra as tensors."""
        offsets = None if extra.offsets is None else to_device(extra.offsets.copy(), device)
        return cls(to_device(extra.values.copy(), device), offsets)


class LossInputs(NamedTuple):
    """The data of each loss token that does not depend on the model; none of it carries a gradient.

    proximal_logp_N: of the policy before the first update of the batch, which the ratio is relative to.
    behaviour_logp_N: of the engine, when it sampled. The current ones are `TokenOutputs.logp_N`.
    weights_N: shares in the whole optimizer step, not in this micro-batch. sequence_N: int64, the index of
    the token's sequence in the micro-batch: 0 to S - 1, in order. A sequence is one Sample, and never split
    over micro-batches. ref_logp_N: of the reference policy. returns_N, old_values_N: the critic's targets,
    and its predictions before the step. extras: more arrays from the engine, by name. staleness_N: int64, how
    many versions the token is older than the weights that are served; a trainer always gives it. kl_cov_N:
    coefficients of a penalty for |logp - proximal_logp|, see `PolicyLoss`. coefficients: of this step, in
    place of the loss's own. rounding: a difference of logprobs that may be rounding alone (nats).
    """

    proximal_logp_N: Tensor
    behaviour_logp_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    sequence_N: Tensor
    ref_logp_N: Tensor | None = None
    returns_N: Tensor | None = None
    old_values_N: Tensor | None = None
    extras: Mapping[str, TokenExtra] = MappingProxyType({})
    staleness_N: Tensor | None = None
    kl_cov_N: Tensor | None = None
    coefficients: Coefficients = UNCHANGED
    rounding: float = ROUNDING


class LossOutput(NamedTuple):
    """sum: the scalar to differentiate, the sum of weights_N x term_N.

    metrics: detached sums over the N tokens; divided by the step's number of tokens, after
    adding up all micro-batches, they are means over tokens.
    """

    sum: Tensor
    metrics: Mapping[str, Tensor]


class Loss(Protocol):
    """A function of tokens; it must return the same metrics for every micro-batch.

    One that uses extras declares them: its attribute `extras` is a mapping from names to `ExtraSpec`.
    """

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> LossOutput:
        """The weighted sum and its metrics."""


def needs_entropy_gradient(loss: Loss) -> bool:
    """Whether a loss has an entropy bonus: its `entropy_coef` is not 0, or changes (`adapts_entropy`)."""
    return bool(getattr(loss, "entropy_coef", 0.0) or getattr(loss, "adapts_entropy", False))


def extras_used(loss: Loss) -> Mapping[str, ExtraSpec]:
    """The extras that a loss declares; none where it has no attribute `extras`."""
    declared: Mapping[str, ExtraSpec] = getattr(loss, "extras", {})
    return declared


def promoted(x: Tensor) -> Tensor:
    """The tensor in fp32 or better: half precision rounds a ratio of 1.001 to 1."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
