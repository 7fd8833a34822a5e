"""What goes between the driver and its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.losses import Loss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.types import ScoreRole


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank is told once. models: the Hugging Face directory of each role; `old` is the policy.

    total_steps: that a decay of the learning rate is spread over.
    """

    layout: MegatronConfig
    config: TrainerConfig
    loss: Loss
    models: Mapping[ScoreRole, str]
    total_steps: int


class Told(NamedTuple):
    """Sums over this rank's tokens (nothing where another rank tells them), and what the optimizer says."""

    sums: Mapping[str, float]
    step: Mapping[str, float]
