"""Settings of the algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from agentrl.algorithms.contradictions import contradictions
from agentrl.algorithms.correction_config import (
    CorrectionChoice,
    GateChoice,
    NoCorrectionConfig,
    NoGateConfig,
)
from agentrl.algorithms.distillation_config import OpdConfig
from agentrl.algorithms.entropy import EntropyChoice, KlCovConfig, NoEntropyConfig
from agentrl.algorithms.estimator_choice import EstimatorChoice, GrpoConfig, PpoConfig
from agentrl.algorithms.estimator_config import AlgorithmPart
from agentrl.algorithms.hierarchy import HierarchyConfig
from agentrl.algorithms.shaping import ShapingConfig
from agentrl.config import (
    ImportPath,
    Needs,
    NotNegative,
    Positive,
    Section,
    ShareAboveZero,
    Spelling,
    chosen,
    renamed,
)

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
_NO_CLIP = (1.0, 1e9)
"""Bounds that no ratio reaches: it is above 0, and the loss computes none above exp(20)."""


def _needs_correction(off_policy_by: str) -> str:
    return (
        f"{off_policy_by} trains on tokens of older weights, and correction = none leaves "
        "their bias in the gradient; choose correction = tis (bounds the ratio of each token), mis (masks "
        "sequences beyond bounds), icepop (masks tokens beyond bounds) or opsm (masks bad sequences that the "
        "policy has left), a gate (gate_statistic), the ratio of the loss itself (use_rollout_logprobs), or "
        "experiment without one (--correction none --i-accept-bias)."
    )


class CreditSection(Section):
    """How rewards become advantages."""

    advantage_estimator: EstimatorChoice = GrpoConfig()
    """How rewards become advantages, and which loss goes with them: siblings are compared by all but ppo,
    which has a critic, rae and reinforce_plus_plus."""
    custom_advantage_function_path: ImportPath | None = None
    """An estimator of your own in its place (package.module:name)."""
    rollout_data_postprocess_path: ImportPath | None = None
    """Function from scored samples to samples with fewer tokens in the loss, or more extras, before their
    advantages (package.module:name). The trainer computes the proximal logprobs then."""
    custom_loss_function_path: ImportPath | None = None
    """A loss of your own in place of the policy loss (package.module:name)."""
    custom_pg_loss_reducer_function_path: ImportPath | None = None
    """Loss weights of your own in place of loss_weighting: from the samples of each group to a weight of each
    token (package.module:name)."""
    shaping: ShapingConfig = ShapingConfig()
    hierarchy: HierarchyConfig = HierarchyConfig()

    @model_validator(mode="after")
    def _has_one_weighting(self) -> Self:
        given = self.advantage_estimator.loss_weighting
        if self.custom_pg_loss_reducer_function_path is not None and given is not None:
            raise ValueError(
                f"custom_pg_loss_reducer_function_path takes the place of loss_weighting = {given}; leave "
                "one out."
            )
        return self

    @property
    def post_processes(self) -> bool:
        """Whether a function of the user's sees the samples when they have been scored."""
        return self.rollout_data_postprocess_path is not None

    @property
    def has_functions_of_scores(self) -> bool:
        """Whether a function of the user's sees what models say of a batch before its first step."""
        return self.post_processes or self.custom_advantage_function_path is not None

    @property
    def critic(self) -> PpoConfig | None:
        """The settings of the critic; None = there is none."""
        return self.advantage_estimator if isinstance(self.advantage_estimator, PpoConfig) else None


class KlSection(Section):
    """The reference model, and the penalty for divergence from it."""

    kl_coef: Annotated[NotNegative, AlgorithmPart.CREDIT] = 0.0
    """Penalty in the reward for divergence from the reference model: the log-ratio of each token (k1)."""
    use_kl_loss: bool = False
    """Penalty in the loss for divergence from the reference model."""
    kl_loss_coef: Annotated[NotNegative, Needs("use_kl_loss"), AlgorithmPart.LOSS] = 0.0
    """Its weight."""
    kl_loss_type: Annotated[KlKind, Needs("use_kl_loss"), AlgorithmPart.LOSS] = "low_var_kl"
    """Estimate of the divergence in the loss."""
    use_unbiased_kl: Annotated[bool, Needs("use_kl_loss"), AlgorithmPart.LOSS] = False
    """Multiply the estimate in the loss by the probability ratio, which makes its gradient unbiased."""
    kl_target: Positive | None = None
    """Divergence that the penalty is adapted to, from kl_coef or kl_loss_coef on (nats per token); left out,
    the penalty is constant."""
    kl_horizon: Annotated[Positive, Needs("kl_target")] = 10_000.0
    """Rollouts that are trained on in which the penalty changes by a fifth at most (kl_target; count)."""
    ref_load: str | None = None
    """Hugging Face directory of the reference model; left out, the policy before RL."""
    ref_update_interval: Annotated[int, Field(ge=1)] | None = None
    """Iterations after which the reference moves towards the policy (count); left out, it stays."""
    ref_mixup_alpha: Annotated[ShareAboveZero, Needs("ref_update_interval")] = 1.0
    """Share of the policy in it then, 1 = a copy (ref_update_interval)."""

    @property
    def has_penalty(self) -> bool:
        """Whether a reference model scores the samples, for a penalty in the loss or in the reward."""
        return self.use_kl_loss or self.kl_coef > 0


class AlgorithmConfig(KlSection, CreditSection):
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

    ppo_epochs: Annotated[int, Field(ge=1)] = 1
    """Passes over each rollout batch, which share the logprobs before its first update (count)."""
    entropy_coef: Annotated[NotNegative, AlgorithmPart.LOSS] = 0.0
    """Bonus for the policy's entropy."""
    entropy_target: Annotated[Positive | None, AlgorithmPart.LOSS] = None
    """Entropy below which the bonus grows, from entropy_coef on (nats per token); left out, it stays."""
    entropy_coef_step: Annotated[Positive, Needs("entropy_target")] = 1e-3
    """How much the bonus grows or shrinks in an iteration (entropy_target)."""
    entropy_control: EntropyChoice = NoEntropyConfig()
    """Keep the entropy up by the choice of tokens: likely ones with a high advantage lose their gradient
    (clip_cov) or are held where they are (kl_cov), or only uncertain ones keep it (top_entropy)."""

    use_opd: bool = False
    """On-policy distillation: train towards a teacher's logprobs of the policy's own tokens."""
    opd: Annotated[OpdConfig, Needs("use_opd")] = OpdConfig()

    use_rollout_logprobs: bool | None = None
    """Take the engine's logprobs (behaviour) for those before the update (proximal); off: the trainer
    computes these, in the optimizer step itself where a batch takes only one and nothing needs them before.
    Left out, on, unless a correction, a gate, otb, top_entropy or rollout_data_postprocess_path needs them,
    or max_staleness is above 0 and the estimator is neither dppo nor vespo. Set on, the ratio of the loss
    itself corrects for older weights."""
    correction: CorrectionChoice = NoCorrectionConfig()
    """The correction for the engine's probabilities: tis, mis and icepop multiply advantages by the ratio of
    trainer and engine, each with bounds of its own; opsm leaves out sequences with a negative advantage that
    the policy has moved away from. Above max_staleness 0 one is required."""
    gate_statistic: GateChoice = NoGateConfig()
    """What a gate compares with its bounds, to mask what differs between engine and trainer: the log-ratio d
    of the two (k1), d^2 / 2 (k2) or exp(d) - 1 - d (k3); none = no gate."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Where an episode goes on across updates of the weights, leave its tokens before the last of them out of
    the loss; they still count in its denominators."""

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """How far the probability ratio may fall and rise before its gradient is cut off."""
        estimator = self.advantage_estimator
        # KL-Cov is published without a clip: its penalty takes the place of one.
        if not (isinstance(self.entropy_control, KlCovConfig) and estimator.objective == "clip"):
            return estimator.bounds
        low, high = estimator.set_bounds
        return low or _NO_CLIP[0], high or _NO_CLIP[1]

    def rescores(self, *, is_async: bool) -> bool:
        """Whether the trainer computes the proximal logprobs; by default where tokens may be older."""
        if self.use_rollout_logprobs is not None:
            return not self.use_rollout_logprobs
        is_older = is_async and not self.advantage_estimator.takes_ratio_to_engine
        return self.compares_with_engine or self.needs_statistics or self.post_processes or is_older

    @property
    def compares(self) -> bool:
        """Whether the rewards of siblings are compared."""
        return self.advantage_estimator.compares and not self.learns_from_teacher_alone

    @property
    def needs_statistics(self) -> bool:
        """Whether the trainer computes statistics of its distributions, see `Trainer.score`."""
        return self.advantage_estimator.needs_statistics or self.entropy_control.needs_statistics

    @property
    def compares_tokens(self) -> bool:
        """Whether what becomes of a token depends on all tokens of the batch, besides their rewards: those of
        the control of the entropy, or the mean of a correction's factors."""
        return self.entropy_control.compares_tokens or self.correction.is_self_normalized

    @property
    def learns_from_teacher_alone(self) -> bool:
        """Whether rewards give no advantages."""
        return self.use_opd and self.opd.only

    @property
    def needs_proximal_first(self) -> bool:
        """Whether something uses the proximal logprobs before the first optimizer step of a batch.

        Corrections do not, unless they are of the whole batch: the step computes their factors.
        Where tokens are masked, or the policy does not learn yet, the step has not the logprobs of them all.
        """
        in_advantages = self.kl_coef or self.use_opd or self.has_functions_of_scores
        waits = self.critic is not None and self.critic.num_critic_only_steps
        is_partial = self.mask_offpolicy_in_partial_rollout or waits or self.correction.of_batch
        return bool(in_advantages or self.needs_statistics or self.compares_tokens or is_partial)

    @property
    def compares_with_engine(self) -> bool:
        """Whether a correction compares the engine's logprobs with the trainer's."""
        return self.correction.compares or self.is_gated

    @property
    def is_gated(self) -> bool:
        """Whether a gate masks what differs between engine and trainer."""
        return not isinstance(self.gate_statistic, NoGateConfig)

    @property
    def _is_corrected(self) -> bool:
        """Whether something corrects for older weights, be it the ratio of the loss to the engine."""
        has_ratio = self.advantage_estimator.objective != "reinforce"
        is_ratio_to_engine = has_ratio and not self.rescores(is_async=True)
        has_own_loss = self.custom_loss_function_path is not None
        is_in_loss = is_ratio_to_engine and not has_own_loss
        return self.correction.corrects or self.compares_with_engine or is_in_loss

    def check_rollouts(self, group_size: int | None, *, off_policy_by: str) -> None:
        """Check that the algorithm can be applied to groups of this size, and to tokens of this age.

        group_size: None = the groups are those of a journal. off_policy_by: the setting by which tokens may
        be older than the weights; "" = they are not.

        Raises:
            ValueError: an estimator that compares siblings has none, or older weights have no correction.
        """
        name = self.advantage_estimator.name
        if self.compares and group_size is not None and group_size < 2:
            raise ValueError(
                f"n_samples_per_prompt = {group_size}: advantage_estimator `{name}` compares siblings and "
                "needs groups of at least 2; raise n_samples_per_prompt."
            )
        if off_policy_by and not self._is_corrected and not self.correction.accepts_bias:
            raise ValueError(_needs_correction(off_policy_by))

    def check_steps(self, num_steps: int) -> None:
        """Check that the algorithm can be applied with so many optimizer steps for each rollout batch.

        Raises:
            ValueError: a penalty compares with the policy before the only step, which is the current one.
        """
        is_held = isinstance(self.entropy_control, KlCovConfig)
        if is_held and num_steps == 1 and self.use_rollout_logprobs is not True:
            raise ValueError(
                "entropy_control = kl_cov holds tokens where they were before the first optimizer step of a "
                "batch, and there is only one; set num_steps_per_rollout or ppo_epochs to 2 or more."
            )

    @property
    def watched_correction(self) -> str:
        """The name by which a `CorrectionWatch` knows the correction, or without one the gate."""
        return "gate" if self.is_gated and not self.correction.corrects else self.correction.name

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model: for a penalty, or as the teacher."""
        return self.has_penalty or (self.use_opd and self.opd.teacher == "reference")

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Keys of what something else replaces, or leaves out."""
        return dict(self._replaced())

    def _replaced(self) -> Iterator[tuple[str, str]]:
        estimator = self.advantage_estimator
        if not estimator.compares and not estimator.plays_greedy:
            change = f"with {estimator.name}, which compares no siblings; choose one that does"
            yield "hierarchy_roles", change
        if not self.has_penalty:
            yield "kl_target", "without use_kl_loss or kl_coef; add one"
        if not self.has_reference:
            change = "without use_kl_loss or kl_coef, or opd_teacher = reference; add one"
            yield from dict.fromkeys(("ref_load", "ref_update_interval"), change).items()
        if self.is_gated:
            yield "accept_bias", "with a gate, which masks what is biased; drop that"
        if self.custom_loss_function_path is not None:
            yield from self._of_part(AlgorithmPart.LOSS, "with custom_loss_function_path; drop that")
        if self.custom_advantage_function_path is not None:
            yield from self._of_part(AlgorithmPart.CREDIT, "with custom_advantage_function_path; drop that")
        if self.learns_from_teacher_alone:
            change = "with opd_only, which leaves the rewards out; drop that"
            yield from self._of_part(AlgorithmPart.CREDIT, change)
            yield from dict.fromkeys(("custom_advantage_function_path", "shaping"), change).items()

    def _of_part(self, part: AlgorithmPart, change: str) -> Iterator[tuple[str, str]]:
        fields = self.keys().fields
        return ((name, change) for name, field in fields.items() if part in field.metadata)

    @model_validator(mode="after")
    def _settings_belong_together(self) -> Self:
        for sentence in contradictions(self):
            raise ValueError(sentence)
        return self
