"""Per-token losses: plain functions of tensors. Weights are inputs; no loss averages on its own."""

from agentrl.losses.base import (
    ROUNDING,
    ROUNDING_BF16,
    Loss,
    LossInputs,
    LossOutput,
    TokenExtra,
    TokenOutputs,
    extras_used,
    needs_entropy_gradient,
)
from agentrl.losses.contract import check_loss
from agentrl.losses.gpu import compiles, fused, to_device
from agentrl.losses.kl import KlKind, KlTerm, k1, k2, k3, low_var_kl
from agentrl.losses.objectives import OBJECTIVES, LossKernel, Objective
from agentrl.losses.policy import PolicyLoss
from agentrl.losses.sequences import sequence_mean, sequence_sum
from agentrl.losses.sft import sft_loss
from agentrl.losses.tokens import (
    HeadRanks,
    LogitFinish,
    OutputHead,
    Targets,
    logprobs_and_entropy,
    max_logits_of,
)
from agentrl.losses.value import ValueLoss, explained_variance

__all__ = [
    "OBJECTIVES",
    "ROUNDING",
    "ROUNDING_BF16",
    "HeadRanks",
    "KlKind",
    "KlTerm",
    "LogitFinish",
    "Loss",
    "LossInputs",
    "LossKernel",
    "LossOutput",
    "Objective",
    "OutputHead",
    "PolicyLoss",
    "Targets",
    "TokenExtra",
    "TokenOutputs",
    "ValueLoss",
    "check_loss",
    "compiles",
    "explained_variance",
    "extras_used",
    "fused",
    "k1",
    "k2",
    "k3",
    "logprobs_and_entropy",
    "low_var_kl",
    "max_logits_of",
    "needs_entropy_gradient",
    "sequence_mean",
    "sequence_sum",
    "sft_loss",
    "to_device",
]
