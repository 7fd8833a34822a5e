"""The runs of the benchmark of algorithms: frozen before they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.algorithms.recipes import RECIPES
from agentrl.types import JSON

WARM_START = "warm start"
LAGS = (0, 1, 4)
# With one optimizer step an iteration every ratio is 1, and several estimators coincide.
_STEPS: dict[str, JSON] = {"num_steps_per_rollout": 2}

_RECOMPUTED: dict[str, JSON] = {"use_rollout_logprobs": False}
CORRECTIONS: Mapping[str, dict[str, JSON]] = {
    "none": _RECOMPUTED,
    "TIS": {"use_tis": True},
    # Stale weights change a mean more than another precision does.
    "MIS": {"use_mis": True, "mis_lower": 0.5, "mis_upper": 2.0},
    "icepop": {"use_icepop": True},
    "OPSM": {**_RECOMPUTED, "use_opsm": True},
    "engine's logprobs": {"use_rollout_logprobs": True},
}

_OWN: Mapping[str, dict[str, JSON]] = {
    "ppo": {"critic_lr": 2e-3, "lambd": 0.95, "num_critic_only_steps": 2},
}


@dataclass(frozen=True, slots=True)
class AlgorithmArm:
    """One way of training from the warm start. settings: override the run file. lag: in updates."""

    name: str
    settings: Mapping[str, JSON] = field(default_factory=dict)
    lag: int = 0


def estimators() -> Sequence[AlgorithmArm]:
    """Every estimator."""
    return [
        AlgorithmArm(name, {**_STEPS, "advantage_estimator": name, **_OWN.get(name, {})}) for name in RECIPES
    ]


def control() -> AlgorithmArm:
    """A control that must not learn: every episode gets the reward of a random sibling."""
    return AlgorithmArm("grpo shuffled", {**_STEPS, "shuffle_rewards": True})


def lags() -> Sequence[AlgorithmArm]:
    """grpo with delayed weights under every correction, one update an iteration."""
    return [
        AlgorithmArm(f"lag {lag} {name}", settings, lag)
        for lag in LAGS
        for name, settings in CORRECTIONS.items()
        if lag or name == "none"
    ]
