"""Settings of an algorithm that contradict each other: a run refuses them in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.algorithms.correction_config import ComparingConfig, OpsmConfig
from agentrl.algorithms.entropy import KlCovConfig
from agentrl.algorithms.estimator_choice import GdpoConfig, PpoConfig, RaeConfig, RemaxConfig

if TYPE_CHECKING:
    from agentrl.algorithms.config import AlgorithmConfig


def contradictions(config: AlgorithmConfig) -> Iterator[str]:
    """A sentence for each contradiction, with what to do about it."""
    yield from _of_logprobs(config)
    yield from _of_the_loss(config)
    yield from _of_rewards(config)


def _of_logprobs(config: AlgorithmConfig) -> Iterator[str]:
    correction, estimator = config.correction, config.advantage_estimator
    if config.compares_with_engine and config.use_rollout_logprobs:
        name = f"correction = {correction.name}" if isinstance(correction, ComparingConfig) else "a gate"
        yield (
            f"{name} compares the engine's logprobs with the trainer's, and "
            "use_rollout_logprobs takes the engine's for both; leave one out."
        )
    if config.needs_statistics and config.use_rollout_logprobs:
        by = (
            estimator.name
            if estimator.needs_statistics
            else f"entropy_control = {config.entropy_control.name}"
        )
        yield (
            f"{by} needs what the trainer computes of its own distributions, and use_rollout_logprobs "
            "leaves that pass out; leave one out."
        )


def _of_the_loss(config: AlgorithmConfig) -> Iterator[str]:
    if config.custom_loss_function_path is not None:
        parts = {
            "entropy_control = kl_cov": isinstance(config.entropy_control, KlCovConfig),
            "correction = opsm": isinstance(config.correction, OpsmConfig),
        }
        for part in (part for part, is_chosen in parts.items() if is_chosen):
            yield (
                f"{part} is a part of the policy loss, which custom_loss_function_path replaces; leave one "
                "out."
            )
    if config.kl_coef and config.use_kl_loss:
        yield "kl_coef puts the penalty in the reward, use_kl_loss in the loss; choose one."
    if config.kl_target is not None and config.use_kl_loss and not config.kl_loss_coef:
        yield "kl_target adapts the penalty by factors, from kl_loss_coef on; set it above 0."


def _of_rewards(config: AlgorithmConfig) -> Iterator[str]:
    estimator = config.advantage_estimator
    if isinstance(estimator, RaeConfig) and config.hierarchy.reward_shares:
        yield (
            "rae has a baseline for each agent, from its own rewards, which hierarchy_reward_shares does "
            "not change; leave it out, or choose another advantage_estimator."
        )
    if isinstance(estimator, GdpoConfig) and config.hierarchy.reward_shares:
        yield (
            "gdpo compares each reward by its name, and hierarchy_reward_shares changes only their sum; "
            "leave one out."
        )
    if config.use_opd and config.opd.num_teachers != 1:
        yield (
            "use_opd needs one teacher: opd_teacher_load (a directory), opd_teacher_url (a server), or "
            "opd_teacher (self or reference); name one of them."
        )
    needs_rewards = {PpoConfig: "trains a critic on them", RemaxConfig: "plays a baseline for them"}
    if config.learns_from_teacher_alone and type(estimator) in needs_rewards:
        yield (
            f"opd_only leaves the rewards out, and `{estimator.name}` {needs_rewards[type(estimator)]}; "
            "choose another advantage_estimator."
        )
