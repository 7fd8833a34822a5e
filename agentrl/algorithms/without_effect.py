"""Settings of an algorithm that have no effect beside the others: a run refuses them by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from agentrl.algorithms.correction_config import CorrectionName
from agentrl.algorithms.recipes import RECIPES, UNBOUNDED

if TYPE_CHECKING:
    from agentrl.algorithms.config import AlgorithmConfig

COMPARING = ("tis", "mis", "icepop")
"""Corrections that compare the engine's logprobs with the trainer's."""
_DISCOUNTING = ("ppo", "reinforce_plus_plus")
_OF_PPO = (
    *("lambd", "value_clip", "bootstrap_truncated", "critic_lr", "num_critic_only_steps", "critic_data"),
)
_OF_VESPO = ("vespo_k_positive", "vespo_lambda_positive", "vespo_k_negative", "vespo_lambda_negative")
_ESTIMATORS_OF: Mapping[str, Sequence[str]] = {
    "scale_rewards": ("grpo", "grpo_passk", "gigpo", "gspo", "gmpo", "cispo", "sapo", "vespo", "dppo"),
    **dict.fromkeys(("sapo_tau_positive", "sapo_tau_negative"), ("sapo",)),
    **dict.fromkeys(_OF_VESPO, ("vespo",)),
    "dppo_divergence": ("dppo",),
    "gdpo_weights": ("gdpo",),
    "gigpo_step_advantage_weight": ("gigpo",),
    "rae_decay": ("rae",),
    "discount_per": _DISCOUNTING,
    **dict.fromkeys(_OF_PPO, ("ppo",)),
}
"""Keys that apply to some estimators only."""
_OF_OUR_ESTIMATORS = (
    *("scale_rewards", "credit_level", "gamma", "discount_per", "lambd", "kl_coef", "bootstrap_truncated"),
    *("gdpo_weights", "gigpo_step_advantage_weight", "rae_decay"),
)
_OF_OUR_OBJECTIVES = ("sapo_tau_positive", "sapo_tau_negative", *_OF_VESPO, "dppo_divergence")
_OF_KL_LOSS = ("kl_loss_coef", "kl_loss_type", "use_unbiased_kl")
_OF_OUR_LOSS = (
    *("eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef", "entropy_target"),
    *(*_OF_OUR_OBJECTIVES, *_OF_KL_LOSS),
)


def without_effect(config: AlgorithmConfig) -> Mapping[str, str]:
    """Keys of an estimator, a correction or a loss that was not chosen, each with what to do."""
    return dict(
        [
            *_of_other_estimators(config),
            *_of_other_terms(config),
            *_without_their_switch(config),
            *_of_other_corrections(config),
        ]
    )


def _of_other_estimators(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    if RECIPES[config.advantage_estimator].objective in UNBOUNDED:
        for name in ("eps_clip", "eps_clip_high"):
            yield name, f"with {config.advantage_estimator}, which has no bounds; drop that"
    for name, estimators in _ESTIMATORS_OF.items():
        if config.advantage_estimator not in estimators:
            yield name, f"without advantage_estimator = {' or '.join(estimators)}; choose it"
    by_turns = config.credit_level == "turn"
    discounting = (*_DISCOUNTING, "gigpo")
    if config.advantage_estimator not in discounting and not by_turns:
        yield "gamma", f"without {' or '.join(discounting)}, or credit_level = turn; choose one"
    if not RECIPES[config.advantage_estimator].compares and config.advantage_estimator != "remax":
        yield (
            "hierarchy_roles",
            f"with {config.advantage_estimator}, which compares no siblings; choose one that does",
        )
    if by_turns:
        yield "scale_rewards", "with credit_level = turn; drop that"
    if config.custom_advantage_function_path is not None:
        yield from dict.fromkeys(_OF_OUR_ESTIMATORS, "with custom_advantage_function_path; drop that").items()
    if config.use_opd and config.opd.only:
        of_rewards = (*_OF_OUR_ESTIMATORS, "custom_advantage_function_path", "shaping")
        yield from dict.fromkeys(of_rewards, "with opd_only, which leaves the rewards out; drop that").items()


def _of_other_terms(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    if not config.use_kl_loss:
        # The penalty in the reward (kl_coef) is always k1: its gradient there is that of the divergence.
        yield from dict.fromkeys(_OF_KL_LOSS, "without use_kl_loss; add it").items()
    if not config.has_penalty:
        yield "kl_target", "without use_kl_loss or kl_coef; add one"
    if not config.has_reference:
        for name in ("ref_load", "ref_update_interval"):
            yield name, "without use_kl_loss or kl_coef, or opd_teacher = reference; add one"
    for name in ("clip_cov", "kl_cov", "top_entropy"):
        if config.entropy_control != name:
            yield name, f"without entropy_control = {name}; choose it"
    if config.custom_loss_function_path is not None:
        yield from dict.fromkeys(_OF_OUR_LOSS, "with custom_loss_function_path; drop that").items()


def _without_their_switch(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    """Keys of something that is not switched on."""
    switches = {
        "critic_data": (config.critic_data, ("critic_data_epochs",)),
        "kl_target": (config.kl_target, ("kl_horizon",)),
        "ref_update_interval": (config.ref_update_interval, ("ref_mixup_alpha",)),
        "entropy_target": (config.entropy_target, ("entropy_coef_step",)),
        "shaping_overlong_len": (
            config.shaping.overlong_len,
            ("shaping_overlong_buffer_len", "shaping_overlong_penalty"),
        ),
        "use_opd": (config.use_opd or None, ("opd",)),
        "opd_teacher_url": (
            config.opd.teacher_url,
            ("opd_teacher_key_env", "opd_teacher_timeout_s", "opd_teacher_concurrency"),
        ),
    }
    for switch, (value, names) in switches.items():
        if value is None:
            yield from dict.fromkeys(names, f"without {switch}; add it").items()


def _of_other_corrections(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    for name in get_args(CorrectionName):
        if name not in ("none", config.correction):
            yield name, f"without use_{name} (correction = {name}); add it"
    if config.correction != "none":
        yield "accept_bias", f"with correction = {config.correction}, which corrects the bias; drop that"
    elif config.gate.statistic != "none":
        yield "accept_bias", "with a gate, which masks what is biased; drop that"
    if config.correction not in COMPARING:
        yield "self_normalize_correction", "without correction = tis, mis or icepop; choose one"
    if config.gate.statistic == "none":
        yield from dict.fromkeys(
            ("gate_over", "gate_lower", "gate_upper"), "without gate_statistic; choose one"
        ).items()
    elif config.gate.statistic != "k1":
        yield "gate_lower", "without gate_statistic = k1; choose it"
    if config.mis.mode == "truncate":
        yield "mis_lower", "without mis_mode = clip or mask; choose one"
