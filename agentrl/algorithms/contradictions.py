"""Settings of an algorithm that contradict each other: a run refuses them in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.algorithms.recipes import DUAL_CLIPPED, RECIPES
from agentrl.algorithms.without_effect import COMPARING

if TYPE_CHECKING:
    from agentrl.algorithms.config import AlgorithmConfig

_WITHOUT_OPD_ONLY = {"ppo": "trains a critic on them", "remax": "plays a baseline for them"}
_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def contradictions(config: AlgorithmConfig) -> Iterator[str]:
    """A sentence for each contradiction, with what to do about it."""
    yield from _of_logprobs(config)
    yield from _of_the_loss(config)
    yield from _of_the_estimator(config)
    yield from _of_the_teacher(config)


def _of_logprobs(config: AlgorithmConfig) -> Iterator[str]:
    if config.compares_with_engine and config.use_rollout_logprobs:
        name = f"correction = {config.correction}" if config.correction in COMPARING else "a gate"
        yield (
            f"{name} compares the engine's logprobs with the trainer's, and "
            "use_rollout_logprobs takes the engine's for both; leave one out."
        )
    if config.needs_statistics and config.use_rollout_logprobs:
        name = "otb" if config.advantage_estimator == "otb" else "entropy_control = top_entropy"
        yield (
            f"{name} needs what the trainer computes of its own distributions, and use_rollout_logprobs "
            "leaves that pass out; leave one out."
        )


def _of_the_loss(config: AlgorithmConfig) -> Iterator[str]:
    if config.entropy_control == "kl_cov" and config.custom_loss_function_path is not None:
        yield (
            "entropy_control = kl_cov is a part of the policy loss, which custom_loss_function_path "
            "replaces; leave one out."
        )
    if config.correction == "opsm" and config.custom_loss_function_path is not None:
        yield (
            "correction = opsm is a part of the policy loss, which custom_loss_function_path replaces; "
            "leave one out."
        )
    if config.kl_coef and config.use_kl_loss:
        yield "kl_coef puts the penalty in the reward, use_kl_loss in the loss; choose one."
    if config.kl_target is not None and config.use_kl_loss and not config.kl_loss_coef:
        yield "kl_target adapts the penalty by factors, from kl_loss_coef on; set it above 0."
    name = config.advantage_estimator
    if config.eps_clip_c is not None and RECIPES[name].objective not in DUAL_CLIPPED:
        yield f"{name} has no dual clip; leave out eps_clip_c."


def _of_the_estimator(config: AlgorithmConfig) -> Iterator[str]:
    name = config.advantage_estimator
    if config.credit_level == "turn" and name not in ("rloo", "gspo", "cispo"):
        yield (
            f"credit_level = turn compares a turn with those of the other siblings, which `{name}` does "
            "not; choose rloo, gspo or cispo."
        )
    if name == "gigpo" and config.scale_rewards == "batch":
        yield (
            "gigpo divides by the standard deviation of a group, and of the turns of a state, or not at "
            "all; choose scale_rewards = group or none."
        )
    if name == "rae" and config.hierarchy.reward_shares:
        yield (
            "rae has a baseline for each agent, from its own rewards, which hierarchy_reward_shares does "
            "not change; leave it out, or choose another advantage_estimator."
        )
    if name == "gdpo" and config.hierarchy.reward_shares:
        yield (
            "gdpo compares each reward by its name, and hierarchy_reward_shares changes only their sum; "
            "leave one out."
        )
    if config.normalize_advantages is False and name in _WHITENED:
        yield (
            f"`{name}` is made of whitened advantages; leave normalize_advantages out, or choose another "
            "advantage_estimator."
        )


def _of_the_teacher(config: AlgorithmConfig) -> Iterator[str]:
    name = config.advantage_estimator
    if config.use_opd and config.opd.num_teachers != 1:
        yield (
            "use_opd needs one teacher: opd_teacher_load (a directory), opd_teacher_url (a server), or "
            "opd_teacher (self or reference); name one of them."
        )
    if config.use_opd and config.opd.only and name in _WITHOUT_OPD_ONLY:
        yield (
            f"opd_only leaves the rewards out, and `{name}` {_WITHOUT_OPD_ONLY[name]}; choose another "
            "advantage_estimator."
        )
