"""What a loss is given and what it returns. N: the loss tokens of one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class TokenOutputs(NamedTuple):
    """What the model says of each loss token. entropy_N (nats) carries no gradient."""

    logp_N: Tensor
    entropy_N: Tensor


class LossInputs(NamedTuple):
    """What is known of each loss token before the model runs.

    old_logp_N: the policy that the ratio is taken against. rollout_logp_N: what the engine
    said when it sampled. weights_N: shares in the whole optimizer step, not in this micro-batch.
    """

    old_logp_N: Tensor
    rollout_logp_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


class LossOutput(NamedTuple):
    """sum: the scalar to differentiate, the sum of weights_N x term_N.

    metrics: detached sums over the N tokens; divided by the step's number of tokens, after
    adding up all micro-batches, they are means over tokens.
    """

    sum: Tensor
    metrics: Mapping[str, Tensor]


class Loss(Protocol):
    """A function of tokens; it must return the same metrics for every micro-batch."""

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> LossOutput:
        """The weighted sum and its metrics."""
