"""From names to the algorithm: its estimator, its weights, its loss, and the models that score tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from agentrl.algorithms.advantages import AdvantageEstimator
from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.controls import AdaptiveEntropy, AdaptiveKl, Controls, RoleBaselines
from agentrl.algorithms.conversion import DataPostProcess
from agentrl.algorithms.correction_config import CustomConfig, OpsmConfig
from agentrl.algorithms.corrections import Correction, CustomCorrection
from agentrl.algorithms.entropy import KlCovConfig
from agentrl.algorithms.estimator_choice import RaeConfig, SapoConfig, VespoConfig
from agentrl.algorithms.estimator_config import CreditParts
from agentrl.algorithms.estimators import Adjusted
from agentrl.algorithms.filters import has_signal
from agentrl.algorithms.gates import InStages
from agentrl.algorithms.hierarchy import Hierarchical, Hierarchy
from agentrl.algorithms.rewards import KlPenalty
from agentrl.algorithms.shaping import Shaped, Shaping
from agentrl.algorithms.weights import (
    CustomWeights,
    WeightFunction,
    constant,
    prompt_mean,
    rollout_mean,
    sample_mean,
    token_mean,
    ungrouped,
)
from agentrl.assembly import hooks
from agentrl.engine.sglang.teacher import ServedTeacher
from agentrl.errors import ConfigError
from agentrl.losses import KlTerm, Loss, LossKernel, PolicyLoss
from agentrl.trainer.teacher import TrainerTeacher
from agentrl.types import Group, ScoreRole
from agentrl.types.seams import Teacher

_ROLES_OF_TEACHERS: Mapping[str, ScoreRole] = {"self": "old", "reference": "ref"}


def _never(_: Group) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """A run's algorithm.

    estimator: advantages of a rollout batch. correction: of its advantages. uncorrected: the same estimator
    without it, where nothing but the correction needs the proximal logprobs before an optimizer step; then a
    batch that takes one step needs no pass for them. None: something else does, or they are the engine's.
    weights: of the tokens of an optimizer step. roles: those that the trainer scores before advantages are
    estimated; without `old`, the proximal logprobs are the engine's.
    policy_term_only: whether a token whose advantage is 0 has no gradient.
    is_idle: whether all advantages of a group are 0, whatever its scores, and no other term of the loss
    applies to it.
    max_staleness: of the run, in versions; None = no token is older than the weights. masks_older: see
    `RolloutBatch`. statistics: whether the trainer computes those of its distributions, see `Trainer.score`.
    teacher: scores the tokens, too; None = there is none.
    controls: what changes from one iteration to the next. bootstraps: whether the critic's values after the
    last tokens of truncated episodes are needed. post_process: of samples that were scored; None = nothing.
    """

    estimator: AdvantageEstimator
    weights: WeightFunction
    loss: Loss
    roles: tuple[ScoreRole, ...] = ()
    policy_term_only: bool = False
    is_idle: Callable[[Group], bool] = _never
    max_staleness: int | None = None
    masks_older: bool = False
    statistics: bool = False
    controls: Controls = field(default_factory=Controls)
    bootstraps: bool = False
    correction: Correction | None = None
    uncorrected: AdvantageEstimator | None = None
    teacher: Teacher | None = None
    post_process: DataPostProcess | None = None


def build_algorithm(
    config: AlgorithmConfig, *, max_length: int, max_staleness: int | None = None, max_tokens: int = 0
) -> Algorithm:
    """Build all parts.

    max_length: most tokens of an episode, which constant weights divide by. max_staleness: of an asynchronous
    run, in versions; None = no token is older than the weights that it is trained from. max_tokens: of the
    trainer's rows, where that is more than max_length.

    Raises:
        ConfigError: a custom estimator or loss cannot be imported, or violates its contract; or a teacher's
            address or key is invalid.
    """
    controls = build_controls(config)
    estimator, roles = build_estimator(config, controls), roles_of(config, is_async=max_staleness is not None)
    in_step = "old" in roles and not config.needs_proximal_first
    return Algorithm(
        estimator=estimator,
        weights=build_weights(config, max_length),
        loss=build_loss(config),
        roles=roles,
        policy_term_only=policy_term_only(config),
        is_idle=build_is_idle(config),
        max_staleness=max_staleness,
        masks_older=config.mask_offpolicy_in_partial_rollout and max_staleness is not None,
        statistics=config.needs_statistics,
        controls=controls,
        bootstraps=config.critic is not None and config.critic.bootstrap_truncated,
        correction=estimator.correction,
        uncorrected=replace(estimator, correction=None) if in_step else None,
        teacher=build_teacher(config, max(max_length, max_tokens)),
        post_process=hooks.ROLLOUT_DATA_POSTPROCESS_PATH.maybe(config.rollout_data_postprocess_path),
    )


def build_controls(config: AlgorithmConfig) -> Controls:
    """What the configuration adapts from one iteration to the next, as it begins."""
    kl = entropy = None
    if config.kl_target is not None:
        coef = config.kl_loss_coef if config.use_kl_loss else config.kl_coef
        kl = AdaptiveKl(coef, config.kl_target, config.kl_horizon)
    if config.entropy_target is not None:
        entropy = AdaptiveEntropy(config.entropy_coef, config.entropy_target, config.entropy_coef_step)
    estimator = config.advantage_estimator
    baselines = RoleBaselines(estimator.decay) if isinstance(estimator, RaeConfig) else None
    return Controls(kl, entropy, baselines, "kl_loss" if config.use_kl_loss else "ref_kl")


def build_estimator(config: AlgorithmConfig, controls: Controls | None = None) -> Adjusted:
    """The estimator that the configuration names, with the adjustments of its advantages.

    controls: those that it follows; None = they are as they begin.

    Raises:
        ConfigError: a custom estimator cannot be imported, or violates its contract.
    """
    path = config.custom_advantage_function_path
    controls = controls or build_controls(config)
    kl = KlPenalty(config.kl_coef, controls.kl) if config.kl_coef else None
    if path is None:
        estimator = config.advantage_estimator.estimator(CreditParts(kl, controls.baselines))
    else:
        estimator = hooks.CUSTOM_ADVANTAGE_FUNCTION_PATH.at(path)
    if config.hierarchy.is_set:
        estimator = Hierarchical(estimator, _hierarchy(config))
    return Adjusted(
        Shaped(estimator, _shaping(config)) if config.shaping.is_set else estimator,
        opd_kl_coef=config.opd.kl_coef if config.use_opd else 0.0,
        opd_only=config.learns_from_teacher_alone,
        normalize_advantages=config.advantage_estimator.normalizes,
        control=config.entropy_control.control(),
        correction=_correction(config),
    )


def build_loss(config: AlgorithmConfig) -> Loss:
    """The loss of the estimator, or a custom one, which has been checked.

    Raises:
        ConfigError: a custom loss cannot be imported, or violates its contract.
    """
    if config.custom_loss_function_path is not None:
        return hooks.CUSTOM_LOSS_FUNCTION_PATH.at(config.custom_loss_function_path)
    low, high = config.ratio_bounds
    estimator, correction = config.advantage_estimator, config.correction
    sapo = estimator if isinstance(estimator, SapoConfig) else SapoConfig()
    vespo = estimator if isinstance(estimator, VespoConfig) else VespoConfig()
    return PolicyLoss(
        eps_clip=low,
        eps_clip_high=high,
        eps_clip_c=estimator.dual_clip,
        objective=estimator.loss_objective,
        entropy_coef=config.entropy_coef,
        adapts_entropy=config.entropy_target is not None,
        kl=_kl_term(config),
        opsm_delta=correction.delta if isinstance(correction, OpsmConfig) else None,
        sapo_tau=(sapo.tau_positive, sapo.tau_negative),
        vespo=(
            LossKernel(vespo.k_positive, vespo.lambda_positive),
            LossKernel(vespo.k_negative, vespo.lambda_negative),
        ),
    )


def roles_of(config: AlgorithmConfig, *, is_async: bool = False) -> tuple[ScoreRole, ...]:
    """The roles that the trainer scores before advantages are estimated, besides those of a teacher.

    is_async: tokens may be older than the weights.
    """
    is_scored: dict[ScoreRole, bool] = {
        "old": config.rescores(is_async=is_async),
        "ref": config.has_penalty,
        "values": config.critic is not None,
    }
    return tuple(role for role, scored in is_scored.items() if scored)


def build_teacher(config: AlgorithmConfig, max_tokens: int) -> Teacher | None:
    """What scores tokens for on-policy distillation; None = nothing does.

    max_tokens: of the trainer's rows (count).

    Raises:
        ConfigError: an address is invalid, or an environment variable holds no key.
    """
    if not config.use_opd:
        return None
    opd, roles = config.opd, _ROLES_OF_TEACHERS
    if opd.teacher_url is None:
        return TrainerTeacher("teacher" if opd.teacher is None else roles[opd.teacher], max_tokens)
    return ServedTeacher(
        urls=opd.urls,
        key_env=opd.teacher_key_env,
        timeout_s=opd.teacher_timeout_s,
        max_requests=opd.teacher_concurrency,
    )


def policy_term_only(config: AlgorithmConfig) -> bool:
    """Whether the loss is the policy term only, so that a token whose advantage is 0 has no gradient."""
    has_bonus = config.entropy_coef or config.entropy_target is not None
    has_penalty = config.use_kl_loss or isinstance(config.entropy_control, KlCovConfig)
    only = not (has_bonus or has_penalty or config.critic is not None)
    return only and config.custom_loss_function_path is None


def build_is_idle(config: AlgorithmConfig) -> Callable[[Group], bool]:
    """Whether a group has no gradient: if only siblings are compared, and their rewards are equal.

    With whitening, a critic, a teacher, several rewards, those of turns, turns that are compared by their
    states, shaping or a penalty in the reward, advantages differ from 0 at equal rewards. Where tokens are
    compared with all others of the batch, those of such a group count, too; so they do where a function sees
    all scores, to decide what counts. In a hierarchy the rewards are those of its roles.
    """
    estimator = config.advantage_estimator
    only_compares = (
        (estimator.compares and estimator.compares_only)
        and estimator.credit_level == "episode"
        and config.custom_advantage_function_path is None
        and not (estimator.normalizes or config.kl_coef or config.use_opd or config.shaping.is_set)
        and not config.compares_tokens
        and not config.post_processes
    )
    if not (only_compares and policy_term_only(config)):
        return _never
    return partial(_without_signal, _hierarchy(config) if config.hierarchy.is_set else None)


def _without_signal(hierarchy: Hierarchy | None, group: Group) -> bool:
    return not has_signal(group if hierarchy is None else hierarchy.by_role(group))


def check_agents(config: AlgorithmConfig, agents: Sequence[str]) -> None:
    """Check that a hierarchy is one of the agents of the environment.

    Raises:
        ConfigError: it is not.
    """
    try:
        _hierarchy(config).check_agents(agents)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _hierarchy(config: AlgorithmConfig) -> Hierarchy:
    return Hierarchy(config.hierarchy.roles, config.hierarchy.reward_shares)


def _shaping(config: AlgorithmConfig) -> Shaping:
    shaping = config.shaping
    low, high = shaping.low, shaping.high
    return Shaping(
        shaping.scale,
        -math.inf if low is None else low,
        math.inf if high is None else high,
        shaping.turn_penalty,
        shaping.overlong_len,
        shaping.overlong_buffer_len,
        shaping.overlong_penalty,
    )


def build_weights(config: AlgorithmConfig, max_length: int) -> WeightFunction:
    """The weights that the configuration names. max_length: most tokens of an episode.

    Raises:
        ConfigError: a function by path cannot be imported, or violates its contract.
    """
    if config.custom_pg_loss_reducer_function_path is not None:
        path = config.custom_pg_loss_reducer_function_path
        return CustomWeights(hooks.CUSTOM_PG_LOSS_REDUCER_FUNCTION_PATH.at(path))
    match config.advantage_estimator.weighting:
        case "token":
            return ungrouped(token_mean)
        case "sample":
            return ungrouped(sample_mean)
        case "rollout":
            return ungrouped(rollout_mean)
        case "prompt":
            return prompt_mean
        case "constant":
            return ungrouped(partial(constant, max_length=max_length))


def _correction(config: AlgorithmConfig) -> Correction | None:
    weight, gate, named = config.correction.correction(), config.gate_statistic.gate(), config.correction
    if isinstance(named, CustomConfig):
        weight = CustomCorrection(hooks.CUSTOM_TIS_FUNCTION_PATH.at(str(named.tis_function_path)))
    if gate is None and not named.is_self_normalized:
        return weight
    return InStages(weight, gate, named.counted if named.is_self_normalized else None)


def _kl_term(config: AlgorithmConfig) -> KlTerm | None:
    if not config.use_kl_loss:
        return None
    return KlTerm(config.kl_loss_coef, config.kl_loss_type, config.use_unbiased_kl)
