"""Whether the trainer learns which tokens top-p and top-k kept: of the rollouts and the engine together."""

from __future__ import annotations

from agentrl.engine.config import MAX_TOP_LOGPROBS, EngineConfig
from agentrl.rollout.config import RolloutConfig


def are_replayed(rollout: RolloutConfig, engine: EngineConfig) -> bool:
    """Whether `replay_sampling_mask` acts, derived where it was left out."""
    if not rollout.cuts:
        return False
    chosen = rollout.replay_sampling_mask
    return engine.reports_kept_ids(rollout.rollout_top_k) if chosen is None else chosen


def warnings(rollout: RolloutConfig, engine: EngineConfig) -> tuple[str, ...]:
    """A sentence where a cut biases the gradient."""
    if not rollout.cuts or rollout.debug_rollout_only or are_replayed(rollout, engine):
        return ()
    remedy = "replay_sampling_mask corrects it"
    if not engine.reports_kept_ids(rollout.rollout_top_k):
        remedy = f"with rollout_top_k of 1 to {MAX_TOP_LOGPROBS}, {remedy}"
    return (
        f"rollout_top_p = {rollout.rollout_top_p:g} and rollout_top_k = {rollout.rollout_top_k} cut the "
        "distribution that is sampled, while logprobs and gradients are the whole policy's: the gradient is "
        f"biased towards tokens that the cut kept; {remedy}, and 1 and 0 switch both off.",
    )


def check(rollout: RolloutConfig, engine: EngineConfig) -> None:
    """Check that the engine can report what it keeps. Behind an address there may be one that always does.

    Raises:
        ValueError: replay_sampling_mask is on, and it cannot.
    """
    is_asked = rollout.cuts and rollout.replay_sampling_mask and engine.sglang_url is None
    if is_asked and not engine.reports_kept_ids(rollout.rollout_top_k):
        raise ValueError(
            "replay_sampling_mask needs to know which tokens are kept, and SGLang reports at most the "
            f"{MAX_TOP_LOGPROBS} likeliest; set rollout_top_k to 1 to {MAX_TOP_LOGPROBS}, or switch "
            "replay_sampling_mask off."
        )
