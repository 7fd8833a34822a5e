"""The interface of an advantage estimator: its inputs and its result. N: the trainable tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from agentrl.algorithms.tokens import Floats, Tokens, TokenScores
from agentrl.types import Group


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """How much better each trainable token of a rollout batch was than expected, float64 [N].

    They are in the order of `Tokens`. returns_N: a critic's targets before each token; None without a critic.
    metrics: of the estimation, by name. clipped_N: the tokens whose ratio was beyond a bound of the
    correction; None without one. kl_cov_N: coefficients of a penalty in the loss, see
    `agentrl.algorithms.entropy.KlCov`; None without one.

    Raises:
        ValueError: they are not flat arrays of one length.
    """

    advantages_N: Floats
    returns_N: Floats | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    clipped_N: npt.NDArray[np.bool_] | None = None
    kl_cov_N: Floats | None = None

    def __post_init__(self) -> None:
        arrays = (self.advantages_N, self.returns_N, self.kl_cov_N)
        shapes = {array.shape for array in arrays if array is not None}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise ValueError(f"advantages and returns must be flat and of one length, got {sorted(shapes)}")


class AdvantageEstimator(Protocol):
    """Advantages of a complete rollout batch at once, in numpy."""

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """One advantage for each of the N `tokens`, whose rollouts are all in `groups`.

        `tokens` may leave out rollouts of `groups`; baselines still count them.
        """
