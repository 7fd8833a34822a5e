"""Settings of the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from agentrl.config import Section

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
KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Place = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]


class Recipe(NamedTuple):
    """What a named estimator is made of, where nothing else is said.

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
    "reinforce_plus_plus": Recipe("clip", False, "token", _NEAR),
    "reinforce_plus_plus_baseline": Recipe("clip", True, "token", _NEAR),
    "ppo": Recipe("clip", False, "token", _NEAR, normalize=True),
}


class AlgorithmConfig(Section):
    """How rewards become advantages, and advantages a loss."""

    advantage_estimator: Estimator = "grpo"
    """How rewards become advantages, and which loss goes with them: siblings are compared by grpo, dr_grpo,
    rloo, maxrl, gspo, cispo and reinforce_plus_plus_baseline; ppo has a critic."""
    custom_advantage_function_path: Place | None = None
    """An estimator of your own in its place (package.module:name)."""
    custom_loss_function_path: Place | None = None
    """A loss of your own in place of the policy loss (package.module:name)."""

    grpo_std_normalization: bool = True
    """Divide a group's advantages by the standard deviation of its rewards (grpo, gspo, cispo)."""
    credit_level: Literal["episode", "turn"] = "episode"
    """Compare whole episodes, or turn by turn what came after (rloo, gspo, cispo)."""
    gamma: Share = 1.0
    """Discount of later rewards (ppo, reinforce_plus_plus, and credit by turns)."""
    discount_per: Literal["token", "turn"] = "token"
    """What gamma and lambd count (ppo, reinforce_plus_plus); credit by turns counts turns."""
    lambd: Share = 1.0
    """GAE: 1 trusts returns, 0 the critic (ppo)."""
    normalize_advantages: bool | None = None
    """Whiten advantages over the batch; left out, ppo does. reinforce_plus_plus always does."""
    loss_weighting: Weighting | None = None
    """What counts the same: every token, sample or rollout, or every token divided by a constant; left out,
    token; gspo sample, dr_grpo constant."""

    eps_clip: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """How far below 1 the probability ratio may fall before the loss stops following it (ratio); left out,
    0.2; gspo 0.0003, cispo 1: no bound."""
    eps_clip_high: Positive | None = None
    """How far above 1 the probability ratio may rise before the loss stops following it (ratio); left out,
    0.28; gspo 0.0004, cispo 4."""
    eps_clip_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: a negative advantage weighs at most this often (ratio); left out, none."""
    value_clip: Positive | None = 0.2
    """How far the critic's values may move in a step before its loss stops following them (reward)."""
    entropy_coef: NotNegative = 0.0
    """Bonus for the policy's entropy."""

    kl_coef: NotNegative = 0.0
    """Penalty in the reward for straying from the reference model: the log-ratio of each token (k1)."""
    use_kl_loss: bool = False
    """Penalty in the loss for straying from the reference model."""
    kl_loss_coef: NotNegative = 0.0
    """Its weight."""
    kl_loss_type: KlKind = "low_var_kl"
    """Estimate of the divergence in the loss."""
    use_unbiased_kl: bool = False
    """Weigh the estimate in the loss by the probability ratio, which makes its gradient right."""
    ref_load: str | None = None
    """Hugging Face directory of the reference model; left out, the policy as RL begins."""

    use_opd: bool = False
    """On-policy distillation: pull towards a teacher's logprobs of the policy's own tokens."""
    opd_kl_coef: Positive = 1.0
    """Its weight in the advantages."""
    opd_teacher_load: str | None = None
    """Hugging Face directory of the teacher; it has the policy's vocabulary."""

    use_rollout_logprobs: bool | None = None
    """Take the old logprobs from the engine, as it sampled; off: the trainer computes them again. Left out,
    on, unless a correction compares the two."""
    use_tis: bool = False
    """Correct for the engine's probabilities: multiply by the ratio of trainer and engine, truncated."""
    tis_clip: Positive = 2.0
    """Largest factor."""
    tis_clip_low: NotNegative = 0.0
    """Smallest factor."""
    use_mis: bool = False
    """Likewise, by tokens or sequences, truncated, clipped or masked."""
    mis_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Whose ratio: each token's, the whole sequence's, or its mean per token."""
    mis_mode: Literal["truncate", "clip", "mask"] = "mask"
    """What happens beyond the bounds: the factor becomes the bound above, either bound, or 0."""
    mis_lower: NotNegative = 0.5
    """Lower bound (ratio)."""
    mis_upper: Positive = 2.0
    """Upper bound (ratio)."""
    mis_veto: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Drop a sequence with a token whose ratio is below this; left out, none."""
    use_icepop: bool = False
    """Likewise, each token by its ratio, and 0 beyond the bounds."""
    icepop_low: NotNegative = 0.5
    """Lower bound (ratio)."""
    icepop_high: Positive = 5.0
    """Upper bound (ratio)."""
    use_opsm: bool = False
    """Leave out sequences that paid badly and that the policy has moved away from."""
    opsm_delta: Positive = 1e-4
    """How far it may have moved: mean of the engine's logprobs minus the policy's (nats per token)."""

    critic_lr: Positive | None = None
    """Peak learning rate of the critic (ppo); left out, lr."""
    num_critic_only_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps that the critic learns before the policy does (count)."""

    @property
    def recipe(self) -> Recipe:
        """What the estimator is made of, with what was said of it."""
        recipe = RECIPES[self.advantage_estimator]
        low, high = recipe.eps
        return recipe._replace(
            weighting=self.loss_weighting or recipe.weighting,
            eps=(self.eps_clip or low, self.eps_clip_high or high),
            normalize=recipe.normalize if self.normalize_advantages is None else self.normalize_advantages,
        )

    @property
    def corrects(self) -> bool:
        """Whether the engine's probabilities are compared with the trainer's."""
        return self.use_tis or self.use_mis or self.use_icepop

    @property
    def rescores(self) -> bool:
        """Whether the trainer computes the old logprobs."""
        return self.corrects if self.use_rollout_logprobs is None else not self.use_rollout_logprobs

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is asked."""
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def without_effect(self) -> Mapping[str, str]:
        """Keys that change nothing under the others, and what they need."""
        # The reward (kl_coef) takes k1 alone: it is the one whose gradient there is that of the divergence.
        return {} if self.use_kl_loss else {"kl_loss_type": "use_kl_loss"}

    @model_validator(mode="after")
    def _corrections_compare(self) -> AlgorithmConfig:
        chosen = [name for name in ("use_tis", "use_mis", "use_icepop") if getattr(self, name)]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} correct for the same thing; choose one.")
        if chosen and self.use_rollout_logprobs:
            raise ValueError(
                f"{chosen[0]} compares the engine's logprobs with the trainer's, and use_rollout_logprobs "
                "takes the engine's for both; leave one out."
            )
        bounds = {
            "tis_clip": (self.tis_clip_low, self.tis_clip),
            "mis": (self.mis_lower, self.mis_upper),
            "icepop": (self.icepop_low, self.icepop_high),
        }
        for name, (low, high) in bounds.items():
            if low >= high:
                raise ValueError(
                    f"the lower bound of {name} ({low:g}) must be below the upper ({high:g}); change one."
                )
        return self

    @model_validator(mode="after")
    def _settings_belong_together(self) -> AlgorithmConfig:
        name = self.advantage_estimator
        if self.kl_coef and self.use_kl_loss:
            raise ValueError("kl_coef puts the penalty in the reward, use_kl_loss in the loss; choose one.")
        if self.kl_loss_coef and not self.use_kl_loss:
            raise ValueError(f"kl_loss_coef = {self.kl_loss_coef:g} needs use_kl_loss; set it.")
        if self.credit_level == "turn" and name not in ("rloo", "gspo", "cispo"):
            raise ValueError(
                f"credit_level = turn compares a turn with those of the other siblings, which `{name}` does "
                "not; choose rloo, gspo or cispo."
            )
        if self.use_opd != (self.opd_teacher_load is not None):
            raise ValueError("use_opd and opd_teacher_load, the teacher's directory, go together; set both.")
        if self.eps_clip_c is not None and RECIPES[name].objective == "cispo":
            raise ValueError("cispo has bounded weights already; leave out eps_clip_c.")
        return self
