"""What the benchmark of the algorithms runs: frozen before its figures are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.algorithms.config import RECIPES
from agentrl.types import JSON

WARM_START = "warm start"
LAGS = (0, 1, 4)
# With one optimizer step an iteration no ratio ever leaves 1, and several estimators are the same.
_STEPS: dict[str, JSON] = {"num_steps_per_rollout": 2}

_SCORED_ANEW: dict[str, JSON] = {"use_rollout_logprobs": False}
CORRECTIONS: Mapping[str, dict[str, JSON]] = {
    "none": _SCORED_ANEW,
    "TIS": {"use_tis": True},
    # Old weights move a mean further than another precision does.
    "MIS": {"use_mis": True, "mis_lower": 0.5, "mis_upper": 2.0},
    "icepop": {"use_icepop": True},
    "OPSM": {**_SCORED_ANEW, "use_opsm": True},
    "engine's logprobs": {"use_rollout_logprobs": True},
}

_OWN: Mapping[str, dict[str, JSON]] = {
    "ppo": {"critic_lr": 2e-3, "lambd": 0.95, "num_critic_only_steps": 2},
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of training from the warm start. settings: laid over the run file. lag: in updates."""

    name: str
    settings: Mapping[str, JSON] = field(default_factory=dict)
    lag: int = 0


def estimators() -> Sequence[Arm]:
    """Every estimator."""
    return [Arm(name, {**_STEPS, "advantage_estimator": name, **_OWN.get(name, {})}) for name in RECIPES]


def control() -> Arm:
    """This one is there to fail: every episode is rewarded with a random sibling's reward."""
    return Arm("grpo shuffled", {**_STEPS, "shuffle_rewards": True})


def lags() -> Sequence[Arm]:
    """grpo with late weights under every correction, one update an iteration."""
    return [
        Arm(f"lag {lag} {name}", settings, lag)
        for lag in LAGS
        for name, settings in CORRECTIONS.items()
        if lag or name == "none"
    ]
