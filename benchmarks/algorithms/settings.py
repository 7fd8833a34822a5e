"""The runs of the benchmark of algorithms: frozen before they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.algorithms.estimator_choice import ESTIMATORS
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
    "TIS with gate": {"use_tis": True, "gate_statistic": "k3", "gate_over": "mean", "gate_upper": 0.05},
    "TIS normalized": {"use_tis": True, "self_normalize_correction": True},
    "engine's logprobs": {"use_rollout_logprobs": True},
    "cispo to engine": {"advantage_estimator": "cispo", "use_rollout_logprobs": True},
    "dppo": {"advantage_estimator": "dppo"},
    "vespo": {"advantage_estimator": "vespo"},
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
    names = [*ESTIMATORS]
    return [
        AlgorithmArm(name, {**_STEPS, "advantage_estimator": name, **_OWN.get(name, {})}) for name in names
    ]


# Terms of the loss, filters and controls, each added to an estimator.
_VARIANTS: Mapping[str, dict[str, JSON]] = {
    "dapo": {
        "dynamic_sampling_filter_path": "agentrl.algorithms.filters:zero_std",
        "rollout_sample_filter_path": "agentrl.algorithms.filters:truncated",
        "shaping_overlong_len": 40,
        "shaping_overlong_buffer_len": 8,
    },
    "luspo": {"advantage_estimator": "gspo", "loss_weighting": "constant"},
    "dppo kl": {"advantage_estimator": "dppo", "dppo_divergence": "kl"},
    "grpo 2 epochs": {"ppo_epochs": 2},
    "grpo prompt": {"loss_weighting": "prompt"},
    "grpo batch scale": {"scale_rewards": "batch"},
    "rloo turns": {"advantage_estimator": "rloo", "credit_level": "turn"},
    "ppo bootstrap": {"advantage_estimator": "ppo", **_OWN["ppo"], "bootstrap_truncated": True},
    "grpo clip_cov": {"entropy_control": "clip_cov"},
    "grpo kl_cov": {"entropy_control": "kl_cov"},
    "grpo top_entropy": {"entropy_control": "top_entropy"},
    "grpo entropy target": {"entropy_target": 0.3},
    "grpo kl target": {"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_target": 0.05, "kl_horizon": 1000.0},
    "grpo moving reference": {"use_kl_loss": True, "kl_loss_coef": 0.01, "ref_update_interval": 5},
}


def variants() -> Sequence[AlgorithmArm]:
    """Settings that change an estimator, each with all others at their defaults."""
    return [AlgorithmArm(name, {**_STEPS, **settings}) for name, settings in _VARIANTS.items()]


def controls() -> Sequence[AlgorithmArm]:
    """Controls that must not learn: every episode gets the reward of a random sibling, or weights stay."""
    return [
        AlgorithmArm("grpo shuffled", {**_STEPS, "shuffle_rewards": True}),
        AlgorithmArm("grpo still", {**_STEPS, "lr": 1e-12}),
    ]


def lags() -> Sequence[AlgorithmArm]:
    """Delayed weights under every correction, and estimators that correct, one update an iteration."""
    return [
        AlgorithmArm(f"lag {lag} {name}", settings, lag)
        for lag in LAGS
        for name, settings in CORRECTIONS.items()
        if lag or name == "none"
    ]
