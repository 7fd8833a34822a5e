"""Per-token losses: plain functions of tensors. Weights are inputs; no loss averages on its own."""

from agentrl.losses.base import (
    Loss,
    LossInputs,
    LossOutput,
    TokenExtra,
    TokenOutputs,
    extras_used,
    needs_entropy_gradient,
)
from agentrl.losses.contract import check_loss
from agentrl.losses.kl import KlKind, KlTerm, k1, k2, k3, low_var_kl
from agentrl.losses.objectives import OBJECTIVES, Kernel, Objective
from agentrl.losses.policy import PolicyLoss
from agentrl.losses.sequences import sequence_mean, sequence_sum
from agentrl.losses.sft import sft_loss
from agentrl.losses.tokens import (
    LEAST_LOGP,
    Targets,
    joined_outputs,
    logprobs_and_entropy,
    without_cut,
)
from agentrl.losses.value import ValueLoss, explained_variance

__all__ = [
    "LEAST_LOGP",
    "OBJECTIVES",
    "Kernel",
    "KlKind",
    "KlTerm",
    "Loss",
    "LossInputs",
    "LossOutput",
    "Objective",
    "PolicyLoss",
    "Targets",
    "TokenExtra",
    "TokenOutputs",
    "ValueLoss",
    "check_loss",
    "explained_variance",
    "extras_used",
    "joined_outputs",
    "k1",
    "k2",
    "k3",
    "logprobs_and_entropy",
    "low_var_kl",
    "needs_entropy_gradient",
    "sequence_mean",
    "sequence_sum",
    "sft_loss",
    "without_cut",
]
