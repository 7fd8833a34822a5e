"""Settings of the algorithm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config import Section


class AlgorithmConfig(Section):
    """How rewards become advantages, and advantages a loss."""

    advantage_estimator: Literal["grpo"] = "grpo"
    """How rewards become advantages: grpo compares the siblings of a group."""
    grpo_std_normalization: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    eps_clip: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """How far below 1 the probability ratio may fall before the loss stops following it (ratio)."""
    eps_clip_high: Annotated[float, Field(gt=0.0)] = 0.28
    """How far above 1 the probability ratio may rise before the loss stops following it (ratio)."""
    use_rollout_logprobs: bool = True
    """Take the old logprobs from the engine, as it sampled; off: the trainer computes them again."""
