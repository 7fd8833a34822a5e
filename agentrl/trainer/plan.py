"""What the ranks of a trainer work on, and what they answer; the same for every trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from agentrl.losses import Loss, explained_variance
from agentrl.protocols import TensorSpec
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.shared_buffers import Filled
from agentrl.trainer.launch.work import RankPlace
from agentrl.types import BoolArray, FloatArray, Sample, ScoreRole, TrainBatch


@dataclass(frozen=True, slots=True)
class Learning:
    """How a network learns. total_steps: that a decay of the learning rate is spread over."""

    loss: Loss
    config: TrainerConfig
    total_steps: int


class Done(NamedTuple):
    """What an optimizer did so far: its steps, and those of them that it skipped."""

    steps: int
    skipped: int

    @property
    def stepped(self) -> int:
        """The steps that changed something."""
        return self.steps - self.skipped


class StepSums(NamedTuple):
    """One optimizer step on one rank.

    sums: loss and metrics, summed over this rank's tokens; empty where another rank reports them.
    step: grad_norm, lr, skipped_steps, which all ranks agree on.
    """

    sums: Mapping[str, float]
    step: Mapping[str, float]


class Worker(Protocol):
    """What one rank does for the trainer; every rank gets the same calls with the same arguments."""

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The policy's tensors, in the order in which `weights` gives them."""

    def score(self, samples: Sequence[Sample], role: ScoreRole) -> dict[int, FloatArray]:
        """Logprobs, or values, of the tokens under `scored_tokens`, by sample; on the reporting ranks."""

    def update(self, batch: TrainBatch) -> dict[ScoreRole, StepSums]:
        """One optimizer step over the whole batch, of every network that learns now."""

    def weights(self, manifest: Sequence[TensorSpec], bucket_bytes: int) -> Iterator[Filled]:
        """The policy's weights in buckets, on rank 0; the generator returns their checksum."""

    def save(self, folder: Path) -> tuple[int, dict[ScoreRole, Done]]:
        """Write this rank's part of the trainer's state; the updates, and what each optimizer did."""

    def load(self, folder: Path, step: int, done: Mapping[ScoreRole, Done]) -> None:
        """Go on from what was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ABC):
    """What every rank is given once; it is pickled.

    models: the Hugging Face directory of each role; `old` is the policy. critic: it begins with the policy's
    trunk. critic_warmup: optimizer steps that the critic learns before the policy does (count).
    """

    policy: Learning
    models: Mapping[ScoreRole, str]
    critic: Learning | None = None
    critic_warmup: int = 0

    @property
    def config(self) -> TrainerConfig:
        """What holds for all networks."""
        return self.policy.config

    @property
    def roles(self) -> frozenset[ScoreRole]:
        """The roles that samples can be scored in."""
        return frozenset(self.models) | ({"values"} if self.critic is not None else set())

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Ranks (count)."""

    @property
    @abstractmethod
    def publishes_bf16(self) -> bool:
        """Whether weights are published, and saved, in bfloat16; otherwise in float32."""

    @abstractmethod
    def working(self, place: RankPlace) -> AbstractContextManager[Worker]:
        """The worker of one rank, in the process of that rank."""

    @property
    @abstractmethod
    def layout_facts(self) -> Mapping[str, int]:
        """What the files of a saved state depend on, by the names of settings."""


def scored_tokens(sample: Sample, role: ScoreRole) -> BoolArray:
    """Which tokens a role says something of: all but the first, or those that are learned from."""
    return sample.loss_mask if role == "values" else np.arange(len(sample)) > 0


def step_metrics(ranks: Sequence[StepSums], batch: TrainBatch) -> dict[str, float]:
    """Of one network, put together from all ranks: metrics as means over the batch's loss tokens."""
    sums: dict[str, float] = {}
    for rank in ranks:
        for name, total in rank.sums.items():
            sums[name] = sums.get(name, 0.0) + total
    means = {name: total / batch.num_loss_tokens for name, total in sums.items() if name != "loss"}
    return {**means, "loss": sums["loss"], **ranks[0].step}


def critic_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a step of the critic says, under names that are not the policy's."""
    named = {f"critic_{name}": metrics[name] for name in ("grad_norm", "lr", "skipped_steps")}
    if "value_target" in metrics:
        named["value_explained_variance"] = explained_variance(metrics)
    return named | {name: metrics[name] for name in ("value_loss", "value_clipfrac") if name in metrics}
