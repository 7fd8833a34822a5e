"""What goes between the driver and its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agentrl.losses import Loss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.types import BoolArray, Sample, ScoreRole


@dataclass(frozen=True, slots=True)
class Learning:
    """How a network learns. total_steps: that a decay of the learning rate is spread over."""

    loss: Loss
    config: TrainerConfig
    total_steps: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank is told once.

    models: the Hugging Face directory of each role; `old` is the policy. critic: it begins with the policy's
    trunk. alone: how many steps the critic learns before the policy does (optimizer steps).
    """

    layout: MegatronConfig
    policy: Learning
    models: Mapping[ScoreRole, str]
    critic: Learning | None = None
    alone: int = 0

    @property
    def config(self) -> TrainerConfig:
        """What holds for all networks."""
        return self.policy.config

    @property
    def roles(self) -> frozenset[ScoreRole]:
        """The roles that samples can be scored in."""
        return frozenset(self.models) | ({"values"} if self.critic is not None else set())


class Done(NamedTuple):
    """What an optimizer did so far: its steps, and those of them that it skipped."""

    steps: int
    skipped: int

    @property
    def stepped(self) -> int:
        """The steps that changed something."""
        return self.steps - self.skipped


class Told(NamedTuple):
    """Sums over this rank's tokens (nothing where another rank tells them), and what the optimizer says."""

    sums: Mapping[str, float]
    step: Mapping[str, float]


def scored_tokens(sample: Sample, role: ScoreRole) -> BoolArray:
    """Which tokens a role says something of: all but the first, or those that are learned from."""
    return sample.loss_mask if role == "values" else np.arange(len(sample)) > 0
