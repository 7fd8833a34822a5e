"""Settings of the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from agentrl.algorithms.contradictions import contradictions
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
from agentrl.algorithms.distillation_config import OpdConfig
from agentrl.algorithms.estimator_config import (
    ClipCovConfig,
    DppoConfig,
    GdpoConfig,
    GigpoConfig,
    HierarchyConfig,
    KlCovConfig,
    RaeConfig,
    SapoConfig,
    ShapingConfig,
    ShareAboveZero,
    TopEntropyConfig,
    VespoConfig,
)
from agentrl.algorithms.recipes import (
    BINARY_KL,
    NO_CLIP,
    RECIPES,
    TO_ENGINE,
    Estimator,
    Recipe,
    Weighting,
)
from agentrl.algorithms.without_effect import COMPARING, without_effect
from agentrl.config import ImportPath, Section, Spelling, chosen, renamed

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


def _needs_correction(off_policy_by: str) -> str:
    return (
        f"{off_policy_by} trains on tokens of older weights, and correction = none leaves "
        "their bias in the gradient; choose correction = tis (bounds the ratio of each token), mis (masks "
        "sequences beyond bounds), icepop (masks tokens beyond bounds) or opsm (masks bad sequences that the "
        "policy has left), a gate (gate_statistic), the ratio of the loss itself (use_rollout_logprobs), or "
        "experiment without one (--correction none --i-accept-bias)."
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
    """How rewards become advantages, and which loss goes with them: siblings are compared by all but ppo,
    which has a critic, rae and reinforce_plus_plus."""
    custom_advantage_function_path: ImportPath | None = None
    """An estimator of your own in its place (package.module:name)."""
    custom_loss_function_path: ImportPath | None = None
    """A loss of your own in place of the policy loss (package.module:name)."""

    gdpo: GdpoConfig = GdpoConfig()
    gigpo: GigpoConfig = GigpoConfig()
    rae: RaeConfig = RaeConfig()
    shaping: ShapingConfig = ShapingConfig()
    hierarchy: HierarchyConfig = HierarchyConfig()
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Whose standard deviation of rewards advantages are divided by: that of the group, of the whole batch,
    or none (grpo, grpo_passk, gspo, gmpo, cispo, sapo, vespo, dppo; gigpo: group or none)."""
    credit_level: Literal["episode", "turn"] = "episode"
    """Compare the rewards of episodes, or turn by turn the rewards from that turn on (rloo, gspo, cispo)."""
    gamma: Share = 1.0
    """Discount of later rewards (ppo, reinforce_plus_plus, gigpo, and credit by turns)."""
    discount_per: Literal["token", "turn"] = "token"
    """What gamma and lambd count (ppo, reinforce_plus_plus); gigpo and credit by turns count turns."""
    lambd: Share = 1.0
    """GAE: 1 uses returns only, 0 the critic's next value (ppo)."""
    normalize_advantages: bool | None = None
    """Whiten advantages over the batch; left out, ppo does, and reinforce_plus_plus and its baseline form
    always do."""
    loss_weighting: Weighting | None = None
    """What has equal weight: every token, sample, rollout or prompt, or every token divided by a constant;
    left out, token; gspo, gmpo and sapo sample, dr_grpo constant."""

    ppo_epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over each rollout batch, which share the logprobs before its first update (count)."""
    eps_clip: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """How far below 1 the probability ratio may fall before its gradient is cut off (ratio; gmpo: log-ratio
    in nats; dppo: divergence); left out, 0.2, none with kl_cov; gspo 0.0003, gmpo 0.4, cispo 1: no bound,
    dppo 0.15, with kl 0.05."""
    eps_clip_high: Positive | None = None
    """How far above 1 the probability ratio may rise before its gradient is cut off (ratio; gmpo: log-ratio
    in nats; dppo: divergence); left out, 0.28, none with kl_cov; gspo 0.0004, gmpo 0.4, cispo 4, dppo as
    eps_clip."""
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: a negative advantage is multiplied by at most this (ratio; dppo: any advantage); left out,
    none; dppo 20."""
    sapo: SapoConfig = SapoConfig()
    vespo: VespoConfig = VespoConfig()
    dppo: DppoConfig = DppoConfig()
    value_clip: NotNegative = 0.2
    """How far the critic's values may move in a step before their gradient is cut off (ppo; reward; 0 = no
    bound)."""
    bootstrap_truncated: bool = False
    """Credit the last token of an episode that was cut off with what the critic expects to follow (ppo)."""
    entropy_coef: NotNegative = 0.0
    """Bonus for the policy's entropy."""
    entropy_target: Positive | None = None
    """Entropy below which the bonus grows, from entropy_coef on (nats per token); left out, it stays."""
    entropy_coef_step: Positive = 1e-3
    """How much the bonus grows or shrinks in an iteration (entropy_target)."""
    entropy_control: Literal["none", "clip_cov", "kl_cov", "top_entropy"] = "none"
    """Keep the entropy up by the choice of tokens: likely ones with a high advantage lose their gradient
    (clip_cov) or are held where they are (kl_cov), or only uncertain ones keep it (top_entropy)."""
    clip_cov: ClipCovConfig = ClipCovConfig()
    kl_cov: KlCovConfig = KlCovConfig()
    top_entropy: TopEntropyConfig = TopEntropyConfig()

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
    kl_target: Positive | None = None
    """Divergence that the penalty is adapted to, from kl_coef or kl_loss_coef on (nats per token); left out,
    the penalty is constant."""
    kl_horizon: Positive = 10_000.0
    """Rollouts that are trained on in which the penalty changes by a fifth at most (kl_target; count)."""
    ref_load: str | None = None
    """Hugging Face directory of the reference model; left out, the policy before RL."""
    ref_update_interval: Annotated[int, Field(ge=1)] | None = None
    """Iterations after which the reference moves towards the policy (count); left out, it stays."""
    ref_mixup_alpha: ShareAboveZero = 1.0
    """Share of the policy in it then, 1 = a copy (ref_update_interval)."""

    use_opd: bool = False
    """On-policy distillation: train towards a teacher's logprobs of the policy's own tokens."""
    opd: OpdConfig = OpdConfig()

    use_rollout_logprobs: bool | None = None
    """Take the engine's logprobs (behaviour) for those before the update (proximal); off: the trainer
    computes these, in the optimizer step itself where a batch takes only one and nothing needs them before.
    Left out, on, unless a correction or a gate compares the two, otb or top_entropy needs them, or
    max_staleness is above 0 and the estimator is neither dppo nor vespo. Set on, the ratio of the loss itself
    corrects for older weights."""
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
    critic_data: str | None = None
    """Folder of a run, on whose episodes the critic is trained before RL (ppo)."""
    critic_data_epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over these (critic_data; count)."""

    @property
    def recipe(self) -> Recipe:
        """The estimator's components, with the settings that override them."""
        recipe = RECIPES[self.advantage_estimator]
        if self.advantage_estimator == "dppo" and self.dppo.divergence == "kl":
            recipe = BINARY_KL
        # KL-Cov is published without a clip: its penalty takes the place of one.
        is_held = self.entropy_control == "kl_cov" and recipe.objective == "clip"
        low, high = NO_CLIP if is_held else recipe.eps
        return recipe._replace(
            weighting=self.loss_weighting or recipe.weighting,
            eps=(self.eps_clip or low, self.eps_clip_high or high),
            normalize=recipe.normalize if self.normalize_advantages is None else self.normalize_advantages,
        )

    def rescores(self, *, is_async: bool) -> bool:
        """Whether the trainer computes the proximal logprobs; by default where tokens may be older."""
        if self.use_rollout_logprobs is not None:
            return not self.use_rollout_logprobs
        is_older = is_async and self.advantage_estimator not in TO_ENGINE
        return self.compares_with_engine or self.needs_statistics or is_older

    @property
    def compares(self) -> bool:
        """Whether the rewards of siblings are compared."""
        return self.recipe.compares and not (self.use_opd and self.opd.only)

    @property
    def needs_statistics(self) -> bool:
        """Whether the trainer computes statistics of its distributions, see `Trainer.score`."""
        return self.advantage_estimator == "otb" or self.entropy_control == "top_entropy"

    @property
    def compares_tokens(self) -> bool:
        """Whether what becomes of a token depends on all tokens of the batch, besides their rewards: those of
        the control of the entropy, or the mean of a correction's factors."""
        return self.entropy_control != "none" or self.self_normalize_correction

    @property
    def needs_proximal_first(self) -> bool:
        """Whether something uses the proximal logprobs before the first optimizer step of a batch.

        Corrections do not, unless they divide by a mean over the batch: the step computes their factors.
        Where tokens are masked, or the policy does not learn yet, the step has not the logprobs of them all.
        """
        in_advantages = self.kl_coef or self.use_opd or self.custom_advantage_function_path is not None
        is_partial = self.mask_offpolicy_in_partial_rollout or self.num_critic_only_steps
        return bool(in_advantages or self.needs_statistics or self.compares_tokens or is_partial)

    @property
    def compares_with_engine(self) -> bool:
        """Whether a correction compares the engine's logprobs with the trainer's."""
        return self.correction in COMPARING or self.gate.statistic != "none"

    @property
    def _is_corrected(self) -> bool:
        """Whether something corrects for older weights, be it the ratio of the loss to the engine."""
        is_ratio_to_engine = not self.rescores(is_async=True) and self.recipe.objective != "reinforce"
        has_own_loss = self.custom_loss_function_path is not None
        return (
            self.correction != "none"
            or self.compares_with_engine
            or (is_ratio_to_engine and not has_own_loss)
        )

    def check_rollouts(self, group_size: int | None, *, off_policy_by: str) -> None:
        """Check that the algorithm can be applied to groups of this size, and to tokens of this age.

        group_size: None = the groups are those of a journal. off_policy_by: the setting by which tokens may
        be older than the weights; "" = they are not.

        Raises:
            ValueError: an estimator that compares siblings has none, or older weights have no correction.
        """
        name = self.advantage_estimator
        if self.compares and group_size is not None and group_size < 2:
            raise ValueError(
                f"n_samples_per_prompt = {group_size}: advantage_estimator `{name}` compares siblings and "
                "needs groups of at least 2; raise n_samples_per_prompt."
            )
        if off_policy_by and not self._is_corrected and not self.accept_bias:
            raise ValueError(_needs_correction(off_policy_by))

    def check_steps(self, num_steps: int) -> None:
        """Check that the algorithm can be applied with so many optimizer steps for each rollout batch.

        Raises:
            ValueError: a penalty compares with the policy before the only step, which is the current one.
        """
        if self.entropy_control == "kl_cov" and num_steps == 1 and self.use_rollout_logprobs is not True:
            raise ValueError(
                "entropy_control = kl_cov holds tokens where they were before the first optimizer step of a "
                "batch, and there is only one; set num_steps_per_rollout or ppo_epochs to 2 or more."
            )

    def check_teacher(
        self, privileged_context_path: str | None, temperature: float, *, is_renormalised: bool
    ) -> None:
        """Check that the teacher can score what is played with these settings.

        is_renormalised: the policy's logprobs are over the tokens that top-p and top-k kept.

        Raises:
            ValueError: it would read what the policy reads; or it is served, and the tokens are of another
                temperature or renormalised, which no server does.
        """
        if not self.use_opd:
            return
        if self.opd.teacher is not None and privileged_context_path is None:
            raise ValueError(
                f"opd_teacher = {self.opd.teacher} teaches by what it reads and the policy does not; name a "
                "function that returns it (privileged_context_path), such as "
                "agentrl.algorithms.distillation:answer."
            )
        if self.opd.teacher_url is not None and temperature != 1.0:
            raise ValueError(
                "opd_teacher_url: servers give logprobs of prompts at temperature 1, and rollout_temperature "
                f"is {temperature:g}; sample at 1, or load the teacher (opd_teacher_load)."
            )
        if self.opd.teacher_url is not None and is_renormalised:
            raise ValueError(
                "opd_teacher_url: servers give logprobs of all tokens, and replay_sampling_mask renormalises "
                "the policy's over those that were kept; load the teacher (opd_teacher_load), or sample with "
                "rollout_top_p = 1 and rollout_top_k = 0."
            )

    @property
    def watched_correction(self) -> str:
        """The name by which a `CorrectionWatch` knows the correction, or without one the gate."""
        is_gated = self.correction == "none" and self.gate.statistic != "none"
        return "gate" if is_gated else self.correction

    @property
    def has_penalty(self) -> bool:
        """Whether a reference model scores the samples, for a penalty in the loss or in the reward."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model: for a penalty, or as the teacher."""
        return self.has_penalty or (self.use_opd and self.opd.teacher == "reference")

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Keys of an estimator, a correction or a loss that was not chosen."""
        return without_effect(self)

    @model_validator(mode="after")
    def _settings_belong_together(self) -> AlgorithmConfig:
        for sentence in contradictions(self):
            raise ValueError(sentence)
        return self
