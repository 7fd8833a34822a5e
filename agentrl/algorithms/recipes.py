"""Named estimators: the objective, the weights and the bounds that go with each by default."""

from __future__ import annotations

from typing import Literal, NamedTuple

Estimator = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "opo",
    "otb",
    "gpg",
    "grpo_passk",
    "gdpo",
    "bnpo",
    "gigpo",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "vespo",
    "dppo",
    "remax",
    "rae",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
]
Weighting = Literal["token", "sample", "rollout", "prompt", "constant"]
Objective = Literal["clip", "gspo", "gmpo", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "reinforce"]


class Recipe(NamedTuple):
    """The components of a named estimator, by default.

    compares: it needs siblings. eps: the two bounds of the objective. normalize: advantages are whitened.
    """

    objective: Objective
    compares: bool
    weighting: Weighting
    eps: tuple[float, float]
    normalize: bool = False


_NEAR = (0.2, 0.28)
NO_CLIP = (1.0, 1e9)
"""Bounds that no ratio reaches: it is above 0, and the loss computes none above exp(20)."""
RECIPES: dict[Estimator, Recipe] = {
    "grpo": Recipe("clip", True, "token", _NEAR),
    "dr_grpo": Recipe("clip", True, "constant", _NEAR),
    "rloo": Recipe("clip", True, "token", _NEAR),
    "maxrl": Recipe("clip", True, "token", _NEAR),
    "opo": Recipe("clip", True, "token", _NEAR),
    "otb": Recipe("clip", True, "token", _NEAR),
    "gpg": Recipe("reinforce", True, "token", _NEAR),
    "grpo_passk": Recipe("clip", True, "token", _NEAR),
    "gdpo": Recipe("clip", True, "token", _NEAR),
    "bnpo": Recipe("clip", True, "token", _NEAR),
    "gigpo": Recipe("clip", True, "token", _NEAR),
    "gspo": Recipe("gspo", True, "sample", (3e-4, 4e-4)),
    "gmpo": Recipe("gmpo", True, "sample", (0.4, 0.4)),
    "cispo": Recipe("cispo", True, "token", (1.0, 4.0)),
    "sapo": Recipe("sapo", True, "sample", _NEAR),
    "vespo": Recipe("vespo", True, "token", _NEAR),
    "dppo": Recipe("dppo_tv", True, "token", (0.15, 0.15)),
    "remax": Recipe("clip", False, "token", _NEAR),
    "rae": Recipe("clip", False, "token", _NEAR),
    "reinforce_plus_plus": Recipe("clip", False, "token", _NEAR, normalize=True),
    "reinforce_plus_plus_baseline": Recipe("clip", True, "token", _NEAR, normalize=True),
    "ppo": Recipe("clip", False, "token", _NEAR, normalize=True),
}

BINARY_KL: Recipe = RECIPES["dppo"]._replace(objective="dppo_kl", eps=(0.05, 0.05))
"""dppo with the other divergence."""
DUAL_CLIPPED: tuple[Objective, ...] = ("clip", "gspo", "dppo_tv", "dppo_kl")
"""Objectives with a dual clip."""
UNBOUNDED: tuple[Objective, ...] = ("sapo", "vespo", "reinforce")
"""Objectives without bounds of the ratio."""
TO_ENGINE: tuple[Estimator, ...] = ("vespo", "dppo")
"""Estimators whose ratio is that of the current policy to the engine: it corrects for older weights."""
WITH_GREEDY_SIBLING: tuple[Estimator, ...] = ("remax",)
"""Estimators that compare with one more sibling, which takes the likeliest token throughout."""
