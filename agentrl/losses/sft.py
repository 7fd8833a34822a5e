"""Imitation: the weighted negative log-likelihood of demonstrated tokens."""

from __future__ import annotations

from agentrl.losses.base import LossInputs, LossOutput, TokenOutputs, promoted


def sft_loss(outputs: TokenOutputs, inputs: LossInputs) -> LossOutput:
    """sum of weights_N x (- logp_N); advantages and old logprobs are not used."""
    loss = -(inputs.weights_N * promoted(outputs.logp_N)).sum()
    return LossOutput(loss, {"entropy_loss": promoted(outputs.entropy_N).sum().detach()})
