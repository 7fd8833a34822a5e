"""Per-token losses: plain functions on shapes. Weights are given; nothing averages on its own."""

from agentrl.losses.base import Loss, LossInputs, LossOutput, TokenOutputs
from agentrl.losses.policy import policy_loss
from agentrl.losses.sft import sft_loss
from agentrl.losses.tokens import logprobs_and_entropy

__all__ = [
    "Loss",
    "LossInputs",
    "LossOutput",
    "TokenOutputs",
    "logprobs_and_entropy",
    "policy_loss",
    "sft_loss",
]
