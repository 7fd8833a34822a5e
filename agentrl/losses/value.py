"""The critic's loss: squared error against the returns, clipped around the critic's previous values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from agentrl.losses.base import LossInputs, LossOutput, TokenOutputs, promoted


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """A critic's `Loss` over v = values_N, R = returns_N and c = value_clip (units of reward).

        term = 0.5 x max((v - R)^2, (min(max(v, old_values - c), old_values + c) - R)^2)

    Half the squared error of https://arxiv.org/abs/1707.06347, equation 9. The clip is not in that
    paper but in its reference implementation, which takes the maximum of both;
    https://arxiv.org/abs/2005.12729 studies it among PPO's code-level optimizations. value_clip = None
    leaves it out.

    Metrics, as token means: value_loss (term), value_clipfrac (tokens whose clipped error is
    chosen and differs), value_target (R), value_target_squared, value_error (R - v) and
    value_error_squared, from which `explained_variance` is computed.

    Raises:
        ValueError: value_clip is not above 0.
    """

    value_clip: float | None = 0.2

    def __post_init__(self) -> None:
        if self.value_clip is not None and not 0.0 < self.value_clip < math.inf:
            raise ValueError(f"value_clip must be above 0, got {self.value_clip}")

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> LossOutput:
        """The weighted sum and its metrics.

        Raises:
            ValueError: the values of a critic, their returns or the previous values are missing.
        """
        if outputs.values_N is None or inputs.returns_N is None:
            raise ValueError("a value loss needs values_N and returns_N: train a critic with GAE")
        values_N, returns_N = promoted(outputs.values_N), promoted(inputs.returns_N)
        error_N = returns_N - values_N
        squared_N = error_N.square()
        chosen_N = squared_N
        if self.value_clip is not None:
            if inputs.old_values_N is None:
                raise ValueError("value_clip needs old_values_N; score the batch with the critic first")
            old_N = promoted(inputs.old_values_N)
            near_N = torch.clamp(values_N, old_N - self.value_clip, old_N + self.value_clip)
            chosen_N = torch.maximum(squared_N, (near_N - returns_N).square())
        term_N = 0.5 * chosen_N
        metrics = {
            "value_loss": term_N.sum(),
            "value_clipfrac": (chosen_N > squared_N).sum(),
            "value_target": returns_N.sum(),
            "value_target_squared": returns_N.square().sum(),
            "value_error": error_N.sum(),
            "value_error_squared": squared_N.sum(),
        }
        detached = {name: metric.detach() for name, metric in metrics.items()}
        return LossOutput((inputs.weights_N * term_N).sum(), detached)


def explained_variance(means: Mapping[str, float]) -> float:
    """1 - Var(R - v) / Var(R) from the token means of `ValueLoss`'s metrics; 0 where all returns are equal.

    1: the critic predicts every return. 0: no better than their mean. Below 0: worse.
    """
    variance = means["value_target_squared"] - means["value_target"] ** 2
    unexplained = means["value_error_squared"] - means["value_error"] ** 2
    # The variance of equal returns is a rounding error of either sign.
    negligible = 1e-9 * max(means["value_target_squared"], 1e-30)
    return 1.0 - unexplained / variance if variance > negligible else 0.0
