"""Settings of the algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field, model_validator

from agentrl.config import ImportPath, Section, Spelling, chosen, renamed

Estimator = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "gspo",
    "cispo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
]
Weighting = Literal["token", "sample", "rollout", "constant"]
Objective = Literal["clip", "gspo", "cispo"]
CorrectionName = Literal["none", "tis", "mis", "icepop", "opsm"]
KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Recipe(NamedTuple):
    """The components of a named estimator, by default.

    compares: it needs siblings. eps: the two bounds of the ratio. normalize: advantages are whitened.
    """

    objective: Objective
    compares: bool
    weighting: Weighting
    eps: tuple[float, float]
    normalize: bool = False


_NEAR = (0.2, 0.28)
RECIPES: dict[Estimator, Recipe] = {
    "grpo": Recipe("clip", True, "token", _NEAR),
    "dr_grpo": Recipe("clip", True, "constant", _NEAR),
    "rloo": Recipe("clip", True, "token", _NEAR),
    "maxrl": Recipe("clip", True, "token", _NEAR),
    "gspo": Recipe("gspo", True, "sample", (3e-4, 4e-4)),
    "cispo": Recipe("cispo", True, "token", (1.0, 4.0)),
    "reinforce_plus_plus": Recipe("clip", False, "token", _NEAR, normalize=True),
    "reinforce_plus_plus_baseline": Recipe("clip", True, "token", _NEAR, normalize=True),
    "ppo": Recipe("clip", False, "token", _NEAR, normalize=True),
}


_COMPARING = ("tis", "mis", "icepop")
_DISCOUNTING = ("ppo", "reinforce_plus_plus")
_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
_ESTIMATORS_OF: Mapping[str, Sequence[str]] = {
    "grpo_std_normalization": ("grpo", "gspo", "cispo"),
    "discount_per": _DISCOUNTING,
    **dict.fromkeys(("lambd", "value_clip", "critic_lr", "num_critic_only_steps"), ("ppo",)),
}
"""Keys that apply to some estimators only."""
_OF_OUR_ESTIMATORS = ("grpo_std_normalization", "credit_level", "gamma", "discount_per", "lambd", "kl_coef")
_OF_KL_LOSS = ("kl_loss_coef", "kl_loss_type", "use_unbiased_kl")
_OF_OUR_LOSS = ("eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef", *_OF_KL_LOSS)


class TisConfig(Section):
    """Truncated importance sampling: the factor of a token is its ratio, clipped to two bounds."""

    clip: Positive = 2.0
    """Largest factor of a token (tis)."""
    clip_low: NotNegative = 0.0
    """Smallest factor of a token (tis)."""

    @model_validator(mode="after")
    def _bounds(self) -> TisConfig:
        _check_bounds("tis_clip", self.clip_low, self.clip)
        return self


class MisConfig(Section):
    """Importance sampling by tokens or by sequences, with a choice of what happens beyond the bounds."""

    level: Literal["token", "sequence", "geometric"] = "geometric"
    """Whose ratio: each token's, the whole sequence's, or its geometric mean per token (mis)."""
    mode: Literal["truncate", "clip", "mask"] = "mask"
    """What happens beyond the bounds: the factor becomes the bound above, either bound, or 0 (mis)."""
    lower: NotNegative | None = None
    """Lower bound (mis; ratio); left out, 0.5 for tokens and sequences, 0.999 for a geometric mean."""
    upper: Positive | None = None
    """Upper bound (mis; ratio); left out, 2 for tokens and sequences, 1.001 for a geometric mean."""
    veto: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Drop a sequence with a token whose ratio is below this (mis); left out, none."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Both bounds. A mean over a sequence varies little, so a bound for tokens would have no effect."""
        low, high = (0.999, 1.001) if self.level == "geometric" else (0.5, 2.0)
        return (low if self.lower is None else self.lower, high if self.upper is None else self.upper)

    @model_validator(mode="after")
    def _bounds(self) -> MisConfig:
        _check_bounds("mis", *self.bounds)
        return self


class IcePopConfig(Section):
    """The factor of a token is its ratio, and 0 beyond the bounds."""

    low: NotNegative = 0.5
    """Smallest ratio of a token that counts (icepop)."""
    high: Positive = 5.0
    """Largest ratio of a token that counts (icepop)."""

    @model_validator(mode="after")
    def _bounds(self) -> IcePopConfig:
        _check_bounds("icepop", self.low, self.high)
        return self


class OpsmConfig(Section):
    """Off-policy sequence masking, in the loss."""

    delta: Positive = 1e-4
    """How far the policy may have moved from a sequence with a negative advantage: mean of the engine's
    logprobs minus the policy's (opsm; nats per token)."""


def _check_bounds(name: str, low: float, high: float) -> None:
    if low >= high:
        raise ValueError(
            f"the lower bound of {name} ({low:g}) must be below the upper ({high:g}); change one."
        )


def _needs_correction(off_policy_by: str) -> str:
    return (
        f"{off_policy_by} trains on tokens of older weights, and correction = none leaves "
        "their bias in the gradient; choose correction = tis (bounds the ratio of each token), mis (masks "
        "sequences beyond bounds), icepop (masks tokens beyond bounds) or opsm (masks bad sequences that the "
        "policy has left), or experiment without one (--correction none --i-accept-bias)."
    )


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
        "disable_grpo_std_normalization": Spelling(
            "Same as grpo_std_normalization, off.", lambda off, _: {"grpo_std_normalization": not off}
        ),
    }

    advantage_estimator: Estimator = "grpo"
    """How rewards become advantages, and which loss goes with them: siblings are compared by grpo, dr_grpo,
    rloo, maxrl, gspo, cispo and reinforce_plus_plus_baseline; ppo has a critic."""
    custom_advantage_function_path: ImportPath | None = None
    """An estimator of your own in its place (package.module:name)."""
    custom_loss_function_path: ImportPath | None = None
    """A loss of your own in place of the policy loss (package.module:name)."""

    grpo_std_normalization: bool = True
    """Divide a group's advantages by the standard deviation of its rewards (grpo, gspo, cispo)."""
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
    token; gspo sample, dr_grpo constant."""

    eps_clip: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """How far below 1 the probability ratio may fall before its gradient is cut off (ratio); left out,
    0.2; gspo 0.0003, cispo 1: no bound."""
    eps_clip_high: Positive | None = None
    """How far above 1 the probability ratio may rise before its gradient is cut off (ratio); left out,
    0.28; gspo 0.0004, cispo 4."""
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: a negative advantage is multiplied by at most this (ratio); left out, none."""
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
    computes these. Left out, on, unless a correction compares the two or max_staleness is above 0."""
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
        return self.correction in _COMPARING or is_async

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
        if off_policy_by and self.correction == "none" and not self.accept_bias:
            raise ValueError(_needs_correction(off_policy_by))

    @property
    def has_reference(self) -> bool:
        """Whether a reference model scores the samples."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Keys of an estimator, a correction or a loss that was not chosen."""
        return dict([*self._of_other_estimators(), *self._of_other_terms(), *self._of_other_corrections()])

    def _of_other_estimators(self) -> Iterator[tuple[str, str]]:
        for name, estimators in _ESTIMATORS_OF.items():
            if self.advantage_estimator not in estimators:
                yield name, f"without advantage_estimator = {' or '.join(estimators)}; choose it"
        by_turns = self.credit_level == "turn"
        if self.advantage_estimator not in _DISCOUNTING and not by_turns:
            yield "gamma", f"without {' or '.join(_DISCOUNTING)}, or credit_level = turn; choose one"
        if by_turns:
            yield "grpo_std_normalization", "with credit_level = turn; drop that"
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
        if self.mis.mode == "truncate":
            yield "mis_lower", "without mis_mode = clip or mask; choose one"

    @model_validator(mode="after")
    def _correction_has_two_to_compare(self) -> AlgorithmConfig:
        if self.correction in _COMPARING and self.use_rollout_logprobs:
            raise ValueError(
                f"correction = {self.correction} compares the engine's logprobs with the trainer's, and "
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
        if self.eps_clip_c is not None and RECIPES[name].objective == "cispo":
            raise ValueError("cispo has bounded weights already; leave out eps_clip_c.")
        return self
