"""Settings of the algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from agentrl.algorithms.correction_config import (
    CorrectionName,
    GateConfig,
    IcePopConfig,
    MisConfig,
    NotNegative,
    OpsmConfig,
    Positive,
    TisConfig,
)
from agentrl.algorithms.recipes import (
    BINARY_KL,
    DUAL_CLIPPED,
    RECIPES,
    UNBOUNDED,
    Estimator,
    Recipe,
    Weighting,
)
from agentrl.config import ImportPath, Section, Spelling, chosen, renamed

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

_COMPARING = ("tis", "mis", "icepop")
_DISCOUNTING = ("ppo", "reinforce_plus_plus")
_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
_ESTIMATORS_OF: Mapping[str, Sequence[str]] = {
    "scale_rewards": ("grpo", "grpo_passk", "gspo", "gmpo", "cispo", "sapo", "dppo"),
    **dict.fromkeys(("sapo_tau_positive", "sapo_tau_negative"), ("sapo",)),
    "dppo_divergence": ("dppo",),
    "gdpo_weights": ("gdpo",),
    "discount_per": _DISCOUNTING,
    **dict.fromkeys(("lambd", "value_clip", "critic_lr", "num_critic_only_steps"), ("ppo",)),
}
"""Keys that apply to some estimators only."""
_OF_OUR_ESTIMATORS = (
    *("scale_rewards", "credit_level", "gamma", "discount_per", "lambd", "kl_coef"),
    "gdpo_weights",
)
_OF_OUR_OBJECTIVES = ("sapo_tau_positive", "sapo_tau_negative", "dppo_divergence")
_OF_KL_LOSS = ("kl_loss_coef", "kl_loss_type", "use_unbiased_kl")
_OF_OUR_LOSS = (
    *("eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef"),
    *(*_OF_OUR_OBJECTIVES, *_OF_KL_LOSS),
)


def _needs_correction(off_policy_by: str) -> str:
    return (
        f"{off_policy_by} trains on tokens of older weights, and correction = none leaves "
        "their bias in the gradient; choose correction = tis (bounds the ratio of each token), mis (masks "
        "sequences beyond bounds), icepop (masks tokens beyond bounds) or opsm (masks bad sequences that the "
        "policy has left), a gate (gate_statistic), the ratio of the loss itself (use_rollout_logprobs), or "
        "experiment without one (--correction none --i-accept-bias)."
    )


class SapoConfig(Section):
    """How soon the gradient of a token fades as its ratio leaves 1: the larger, the sooner."""

    tau_positive: Positive = 1.0
    """Temperature where the advantage is positive (sapo)."""
    tau_negative: Positive = 1.05
    """Temperature elsewhere (sapo)."""


class DppoConfig(Section):
    """The trust region of a token around the engine's probability."""

    divergence: Literal["tv", "kl"] = "tv"
    """What eps_clip and eps_clip_high bound: the total variation or the KL of two outcomes, the token and any
    other (dppo)."""


class GdpoConfig(Section):
    """Several rewards, each of which is normalised by itself."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each reward by its name, such as {env = 1.0, brevity = 0.2}; left out, each reward counts 1
    (gdpo; a table; as a flag: JSON)."""


class ShapingConfig(Section):
    """What an estimator compares in place of scores; those that are journalled and logged do not change."""

    scale: float = 1.0
    """Factor of the score (reward)."""
    low: float | None = None
    """Least score that is compared (reward); left out, any."""
    high: float | None = None
    """Largest score that is compared (reward); left out, any."""
    turn_penalty: NotNegative = 0.0
    """Penalty for each turn (reward)."""
    overlong_len: Annotated[int, Field(ge=0)] | None = None
    """Sampled tokens of an episode without a penalty (tokens); left out, any number."""
    overlong_buffer_len: Annotated[int, Field(ge=1)] = 256
    """Further tokens over which the penalty grows to its full size (shaping_overlong_len; tokens)."""
    overlong_penalty: NotNegative = 1.0
    """Its full size (shaping_overlong_len; reward)."""

    @property
    def is_set(self) -> bool:
        """Whether anything changes a score."""
        return self != ShapingConfig()

    @model_validator(mode="after")
    def _bounds(self) -> ShapingConfig:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(
                f"shaping_low ({self.low:g}) must be below shaping_high ({self.high:g}); change one."
            )
        return self


class AlgorithmConfig(Section):
    """How rewards become advantages, and advantages a loss."""

    spellings: ClassVar[Mapping[str, Spelling]] = {
        **{f"use_{name}": chosen("correction", name, "none") for name in ("tis", "mis", "icepop", "opsm")},
        "tis_threshold": renamed("tis_clip"),
        "i_accept_bias": Spelling("Same as accept_bias.", lambda on, _: {"accept_bias": on}),
        "use_critic": chosen("advantage_estimator", "ppo", "grpo"),
        "calculate_per_token_loss": Spelling(
            "Same as loss_weighting = token; off: sample.",
            lambda on, _: {"loss_weighting": "token" if on else "sample"},
        ),
        "grpo_std_normalization": Spelling(
            "Same as scale_rewards = group; off: none.",
            lambda on, _: {"scale_rewards": "group" if on else "none"},
        ),
        "disable_grpo_std_normalization": Spelling(
            "Same as scale_rewards = none; off: group.",
            lambda off, _: {"scale_rewards": "none" if off else "group"},
        ),
    }

    advantage_estimator: Estimator = "grpo"
    """How rewards become advantages, and which loss goes with them: siblings are compared by grpo, dr_grpo,
    all but ppo, which has a critic, and reinforce_plus_plus."""
    custom_advantage_function_path: ImportPath | None = None
    """An estimator of your own in its place (package.module:name)."""
    custom_loss_function_path: ImportPath | None = None
    """A loss of your own in place of the policy loss (package.module:name)."""

    gdpo: GdpoConfig = GdpoConfig()
    shaping: ShapingConfig = ShapingConfig()
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation of rewards advantages are divided by: that of the group, of the whole batch,
    or none (grpo, grpo_passk, gspo, gmpo, cispo, sapo, dppo)."""
    credit_level: Literal["episode", "turn"] = "episode"
    """Compare the rewards of episodes, or turn by turn the rewards from that turn on (rloo, gspo, cispo)."""
    gamma: Share = 1.0
    """Discount of later rewards (ppo, reinforce_plus_plus, and credit by turns)."""
    discount_per: Literal["token", "turn"] = "token"
    """What gamma and lambd count (ppo, reinforce_plus_plus); credit by turns counts turns."""
    lambd: Share = 1.0
    """GAE: 1 uses returns only, 0 the critic's next value (ppo)."""
    normalize_advantages: bool | None = None
    """Whiten advantages over the batch; left out, ppo does, and reinforce_plus_plus and its baseline form
    always do."""
    loss_weighting: Weighting | None = None
    """What has equal weight: every token, sample or rollout, or every token divided by a constant; left out,
    token; gspo, gmpo and sapo sample, dr_grpo constant."""

    ppo_epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over each rollout batch, which share the logprobs before its first update (count)."""
    eps_clip: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """How far below 1 the probability ratio may fall before its gradient is cut off (ratio; gmpo: log-ratio
    in nats; dppo: divergence); left out, 0.2; gspo 0.0003, gmpo 0.4, cispo 1: no bound, dppo 0.15, with kl
    0.05."""
    eps_clip_high: Positive | None = None
    """How far above 1 the probability ratio may rise before its gradient is cut off (ratio; gmpo: log-ratio
    in nats; dppo: divergence); left out, 0.28; gspo 0.0004, gmpo 0.4, cispo 4, dppo as eps_clip."""
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: a negative advantage is multiplied by at most this (ratio; dppo: any advantage); left out,
    none; dppo 20."""
    sapo: SapoConfig = SapoConfig()
    dppo: DppoConfig = DppoConfig()
    value_clip: NotNegative = 0.2
    """How far the critic's values may move in a step before their gradient is cut off (ppo; reward; 0 = no
    bound)."""
    entropy_coef: NotNegative = 0.0
    """Bonus for the policy's entropy."""

    kl_coef: NotNegative = 0.0
    """Penalty in the reward for divergence from the reference model: the log-ratio of each token (k1)."""
    use_kl_loss: bool = False
    """Penalty in the loss for divergence from the reference model."""
    kl_loss_coef: NotNegative = 0.0
    """Its weight."""
    kl_loss_type: KlKind = "low_var_kl"
    """Estimate of the divergence in the loss."""
    use_unbiased_kl: bool = False
    """Multiply the estimate in the loss by the probability ratio, which makes its gradient unbiased."""
    ref_load: str | None = None
    """Hugging Face directory of the reference model; left out, the policy before RL."""

    use_opd: bool = False
    """On-policy distillation: train towards a teacher's logprobs of the policy's own tokens."""
    opd_kl_coef: Positive = 1.0
    """Its weight in the advantages."""
    opd_teacher_load: str | None = None
    """Hugging Face directory of the teacher, a model with the policy's vocabulary."""

    use_rollout_logprobs: bool | None = None
    """Take the engine's logprobs (behaviour) for those before the update (proximal); off: the trainer
    computes these. Left out, on, unless a correction or a gate compares the two, or max_staleness is above 0
    and the estimator is not dppo. Set on, the ratio of the loss itself corrects for older weights."""
    correction: CorrectionName = "none"
    """The correction for the engine's probabilities: tis, mis and icepop multiply advantages by the ratio of
    trainer and engine, each with bounds of its own; opsm leaves out sequences with a negative advantage that
    the policy has moved away from. Above max_staleness 0 one is required."""
    accept_bias: bool = False
    """Train above max_staleness 0 with correction = none, for experiments: the gradient is that of older
    weights, unless a loss of your own corrects it."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Where an episode goes on across updates of the weights, leave its tokens before the last of them out of
    the loss; they still count in its denominators."""
    self_normalize_correction: bool = False
    """Divide the factors of a correction by their mean over the batch (tis, mis, icepop)."""
    gate: GateConfig = GateConfig()
    tis: TisConfig = TisConfig()
    mis: MisConfig = MisConfig()
    icepop: IcePopConfig = IcePopConfig()
    opsm: OpsmConfig = OpsmConfig()

    critic_lr: Positive | None = None
    """Peak learning rate of the critic (ppo); left out, lr."""
    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps that the critic learns before the policy does (count)."""

    @property
    def recipe(self) -> Recipe:
        """The estimator's components, with the settings that override them."""
        recipe = RECIPES[self.advantage_estimator]
        if self.advantage_estimator == "dppo" and self.dppo.divergence == "kl":
            recipe = BINARY_KL
        low, high = recipe.eps
        return recipe._replace(
            weighting=self.loss_weighting or recipe.weighting,
            eps=(self.eps_clip or low, self.eps_clip_high or high),
            normalize=recipe.normalize if self.normalize_advantages is None else self.normalize_advantages,
        )

    def rescores(self, *, is_async: bool) -> bool:
        """Whether the trainer computes the proximal logprobs; by default where tokens may be older."""
        if self.use_rollout_logprobs is not None:
            return not self.use_rollout_logprobs
        return self._compares or (is_async and self.advantage_estimator != "dppo")

    @property
    def _compares(self) -> bool:
        """Whether a correction compares the engine's logprobs with the trainer's."""
        return self.correction in _COMPARING or self.gate.statistic != "none"

    @property
    def _is_corrected(self) -> bool:
        """Whether something corrects for older weights, be it the ratio of the loss to the engine."""
        is_ratio_to_engine = not self.rescores(is_async=True) and self.recipe.objective != "reinforce"
        has_own_loss = self.custom_loss_function_path is not None
        return self.correction != "none" or self._compares or (is_ratio_to_engine and not has_own_loss)

    def check_rollouts(self, group_size: int | None, *, off_policy_by: str) -> None:
        """Check that the algorithm can be applied to groups of this size, and to tokens of this age.

        group_size: None = the groups are those of a journal. off_policy_by: the setting by which tokens may
        be older than the weights; "" = they are not.

        Raises:
            ValueError: an estimator that compares siblings has none, or older weights have no correction.
        """
        name = self.advantage_estimator
        if RECIPES[name].compares and group_size is not None and group_size < 2:
            raise ValueError(
                f"n_samples_per_prompt = {group_size}: advantage_estimator `{name}` compares siblings and "
                "needs groups of at least 2; raise n_samples_per_prompt."
            )
        if off_policy_by and not self._is_corrected and not self.accept_bias:
            raise ValueError(_needs_correction(off_policy_by))

    @property
    def watched_correction(self) -> str:
        """The name by which a `CorrectionWatch` knows the correction, or without one the gate."""
        is_gated = self.correction == "none" and self.gate.statistic != "none"
        return "gate" if is_gated else self.correction

    @property
    def has_reference(self) -> bool:
        """Whether a reference model scores the samples."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Keys of an estimator, a correction or a loss that was not chosen."""
        return dict([*self._of_other_estimators(), *self._of_other_terms(), *self._of_other_corrections()])

    def _of_other_estimators(self) -> Iterator[tuple[str, str]]:
        if RECIPES[self.advantage_estimator].objective in UNBOUNDED:
            for name in ("eps_clip", "eps_clip_high"):
                yield name, f"with {self.advantage_estimator}, which has no bounds; drop that"
        for name, estimators in _ESTIMATORS_OF.items():
            if self.advantage_estimator not in estimators:
                yield name, f"without advantage_estimator = {' or '.join(estimators)}; choose it"
        by_turns = self.credit_level == "turn"
        if self.advantage_estimator not in _DISCOUNTING and not by_turns:
            yield "gamma", f"without {' or '.join(_DISCOUNTING)}, or credit_level = turn; choose one"
        if by_turns:
            yield "scale_rewards", "with credit_level = turn; drop that"
        if self.custom_advantage_function_path is not None:
            yield from dict.fromkeys(
                _OF_OUR_ESTIMATORS, "with custom_advantage_function_path; drop that"
            ).items()

    def _of_other_terms(self) -> Iterator[tuple[str, str]]:
        if not self.use_kl_loss:
            # The penalty in the reward (kl_coef) is always k1: its gradient there is that of the divergence.
            yield from dict.fromkeys(_OF_KL_LOSS, "without use_kl_loss; add it").items()
        if not self.has_reference:
            yield "ref_load", "without use_kl_loss or kl_coef; add one"
        if self.shaping.overlong_len is None:
            for name in ("shaping_overlong_buffer_len", "shaping_overlong_penalty"):
                yield name, "without shaping_overlong_len; add it"
        if not self.use_opd:
            yield "opd_kl_coef", "without use_opd; add it"
        if self.custom_loss_function_path is not None:
            yield from dict.fromkeys(_OF_OUR_LOSS, "with custom_loss_function_path; drop that").items()

    def _of_other_corrections(self) -> Iterator[tuple[str, str]]:
        for name in get_args(CorrectionName):
            if name not in ("none", self.correction):
                yield name, f"without use_{name} (correction = {name}); add it"
        if self.correction != "none":
            yield "accept_bias", f"with correction = {self.correction}, which corrects the bias; drop that"
        if self.correction not in _COMPARING:
            yield "self_normalize_correction", "without correction = tis, mis or icepop; choose one"
        if self.gate.statistic == "none":
            yield from dict.fromkeys(
                ("gate_over", "gate_lower", "gate_upper"), "without gate_statistic; choose one"
            ).items()
        elif self.gate.statistic != "k1":
            yield "gate_lower", "without gate_statistic = k1; choose it"
        if self.mis.mode == "truncate":
            yield "mis_lower", "without mis_mode = clip or mask; choose one"

    @model_validator(mode="after")
    def _correction_has_two_to_compare(self) -> AlgorithmConfig:
        if self._compares and self.use_rollout_logprobs:
            name = f"correction = {self.correction}" if self.correction in _COMPARING else "a gate"
            raise ValueError(
                f"{name} compares the engine's logprobs with the trainer's, and "
                "use_rollout_logprobs takes the engine's for both; leave one out."
            )
        if self.correction == "opsm" and self.custom_loss_function_path is not None:
            raise ValueError(
                "correction = opsm is a part of the policy loss, which custom_loss_function_path replaces; "
                "leave one out."
            )
        return self

    @model_validator(mode="after")
    def _settings_belong_together(self) -> AlgorithmConfig:
        name = self.advantage_estimator
        if self.kl_coef and self.use_kl_loss:
            raise ValueError("kl_coef puts the penalty in the reward, use_kl_loss in the loss; choose one.")
        if self.credit_level == "turn" and name not in ("rloo", "gspo", "cispo"):
            raise ValueError(
                f"credit_level = turn compares a turn with those of the other siblings, which `{name}` does "
                "not; choose rloo, gspo or cispo."
            )
        if self.normalize_advantages is False and name in _WHITENED:
            raise ValueError(
                f"`{name}` is made of whitened advantages; leave normalize_advantages out, or choose another "
                "advantage_estimator."
            )
        if self.use_opd != (self.opd_teacher_load is not None):
            raise ValueError("use_opd and opd_teacher_load, the teacher's directory, go together; set both.")
        if self.eps_clip_c is not None and RECIPES[name].objective not in DUAL_CLIPPED:
            raise ValueError(f"{name} has no dual clip; leave out eps_clip_c.")
        return self
