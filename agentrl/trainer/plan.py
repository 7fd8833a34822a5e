"""The plan that a trainer's ranks receive, their methods and their results; the same for every trainer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from agentrl.losses import Loss, TokenOutputs, explained_variance
from agentrl.trainer.batch import MicroBatch, by_sample
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.cast_weights import Cast
from agentrl.trainer.launch.device_weights import DeviceFacts
from agentrl.trainer.launch.rank_plan import RankPlace
from agentrl.trainer.launch.shared_buffers import Filled
from agentrl.trainer.recording import Phase, Recording
from agentrl.trainer.routing import Float64Array, RoutedReport, routing_metrics
from agentrl.trainer.summary import SavedTrainer
from agentrl.types import BoolArray, FloatArray, Sample, ScoreRole, TrainBatch
from agentrl.types.seams import TensorSpec


@dataclass(frozen=True, slots=True)
class Learning:
    """How a network learns. total_steps: the optimizer steps that a decay of the learning rate takes."""

    loss: Loss
    config: TrainerConfig
    total_steps: int


class Done(NamedTuple):
    """An optimizer's steps so far, and those of them that it skipped."""

    steps: int
    skipped: int

    @property
    def stepped(self) -> int:
        """The steps that changed the weights."""
        return self.steps - self.skipped


class StepSums(NamedTuple):
    """One optimizer step on one rank.

    sums: loss and metrics, summed over this rank's tokens; empty where another rank reports them.
    step: grad_norm, lr, skipped_steps, which are the same on all ranks. logprobs: those of the loss tokens
    before the update, by sample, on the reporting ranks; only where the batch has them taken `in_step`.
    is_left_out: see `ProximalInStep`. routing: of this rank's tokens and layers, see `routing_metrics`.
    """

    sums: Mapping[str, float]
    step: Mapping[str, float]
    logprobs: Mapping[int, FloatArray]
    is_left_out: bool = False
    routing: Float64Array | None = None


class RankScores(NamedTuple):
    """What a rank reports of scored samples.

    values: see `Worker.score`. routed: the experts of this rank's tokens; None = they are not kept.
    """

    values: dict[int, FloatArray]
    routed: RoutedReport | None = None


class Worker(Protocol):
    """One rank of the trainer; every rank gets the same calls with the same arguments."""

    def manifest(self) -> tuple[TensorSpec, ...]:
        """The policy's tensors, in the order of `weights`."""

    def adapters(self) -> tuple[TensorSpec, ...]:
        """Those of its adapters alone, in the order of `weights`, by the names that files of them have."""

    def kernels(self) -> str | None:
        """What it computes with on a GPU, in a sentence for the start of a run; None = on the CPU."""

    def score(self, samples: Sequence[Sample], role: ScoreRole, statistics: bool = False) -> RankScores:
        """Logprobs, or values, of the tokens under `scored_tokens`, by sample; on the reporting ranks.

        statistics: [3, tokens] instead: logprobs, entropies and sums of squared probabilities.
        """

    def update(self, batch: TrainBatch) -> dict[ScoreRole, StepSums]:
        """One optimizer step over the batch, of every network that learns in this step.

        One of the critic only counts for no warm-up.
        """

    def move_reference(self, share: float) -> None:
        """Move the reference towards the policy: share x policy + (1 - share) x reference."""

    def weights(
        self, manifest: Sequence[TensorSpec], bucket_bytes: int, cast: Cast | None = None
    ) -> Generator[Filled, None, int]:
        """The tensors of `manifest` or `adapters` in buckets, on rank 0; the generator returns their
        checksum. cast: None = as they are."""

    def weights_on_device(
        self, manifest: Sequence[TensorSpec], bucket_bytes: int, cast: Cast | None = None
    ) -> DeviceFacts | None:
        """The policy's weights in memory of rank 0's device; None on other ranks, or where it has none.

        What is done with them later are the methods of `DeviceStore`.
        """

    def onload(self) -> int | None:
        """Have on the device all that a step needs; the memory of a GPU that was free before (bytes)."""

    def offload(self) -> int:
        """Free what only a step needs; what the device got back (bytes)."""

    def save(self, folder: Path) -> tuple[int, dict[ScoreRole, Done]]:
        """Write this rank's part of the trainer's state; returns the updates, and each optimizer's steps."""

    def is_written(self) -> bool | OSError:
        """Whether what `save` copied is on disk; why it cannot be written, if so."""

    def load(self, folder: Path, saved: SavedTrainer) -> None:
        """Restore what `save` has written, also where the layout or the trainer was another one.

        saved: its summary.
        """

    def start_recording(self, recording: Recording) -> None:
        """Record this rank from now on."""

    def write_recording(self, recording: Recording, phases: Sequence[Phase]) -> OSError | None:
        """End the recording and write this rank's files; why they cannot be written, if so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ABC):
    """The plan that every rank receives; it is pickled.

    models: the Hugging Face directory of each role; `old` is the policy. critic: initialized with the
    policy's trunk. critic_warmup: optimizer steps of the critic before the first of the policy (count).
    moves_reference: the reference changes (`Worker.move_reference`), so that a saved state holds it, too.
    worker_module: what a rank imports first, since that takes seconds. Its `worker(plan, place)` is a context
    manager, whose value is the `Worker`; a plan knows it by name, for the driver never imports it.
    """

    worker_module: ClassVar[str]
    policy: Learning
    models: Mapping[ScoreRole, str]
    critic: Learning | None = None
    critic_warmup: int = 0
    moves_reference: bool = False

    @property
    def config(self) -> TrainerConfig:
        """The settings that all networks share."""
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

    def worker(self, place: RankPlace) -> AbstractContextManager[Worker]:
        """The worker of one rank, in the process of that rank."""
        opened: Callable[[Plan, RankPlace], AbstractContextManager[Worker]]
        opened = import_module(self.worker_module).worker
        return opened(self, place)

    @property
    @abstractmethod
    def layout_facts(self) -> Mapping[str, int]:
        """The settings that the files of a saved state depend on, by name."""


def scored_tokens(sample: Sample, role: ScoreRole) -> BoolArray:
    """The tokens that a role scores: all but the first; for values, those under the loss mask."""
    return sample.loss_mask if role == "values" else np.arange(len(sample)) > 0


def reported(rows: Sequence[tuple[MicroBatch, TokenOutputs]], *, statistics: bool) -> dict[int, FloatArray]:
    """What a rank reports of scored rows, by sample: [N], or with `statistics` [3, N], see `Worker.score`.

    It waits for the device once, whatever the number of rows.
    """
    if not rows:
        return {}
    parts = [_numbers(outputs, statistics=statistics) for _, outputs in rows]
    numbers: FloatArray = torch.cat(parts, 1).float().cpu().numpy()
    return by_sample([row for row, _ in rows], numbers if statistics else numbers[0])


def _numbers(outputs: TokenOutputs, *, statistics: bool) -> Tensor:
    if outputs.values_N is not None:
        return outputs.values_N[None]
    if not statistics:
        return outputs.logp_N[None]
    assert outputs.sum_pi_squared_N is not None, "no gradient is computed while samples are scored"
    return torch.stack([outputs.logp_N, outputs.entropy_N, outputs.sum_pi_squared_N])


def is_without_gradient(batch: TrainBatch, grad_norm: float) -> bool:
    """Whether a step of this gradient is left out, see `ProximalInStep`."""
    in_step = batch.in_step
    return in_step is not None and in_step.is_left_out_without_gradient and grad_norm == 0.0


def step_metrics(ranks: Sequence[StepSums], batch: TrainBatch) -> dict[str, float]:
    """The metrics of one network's step over all ranks, as means over the batch's loss tokens.

    The losses are sums of weighted terms already.
    """
    sums: dict[str, float] = {}
    for rank in ranks:
        for name, total in rank.sums.items():
            sums[name] = sums.get(name, 0.0) + total
    losses: dict[str, float] = {name: sums.pop(name) for name in ("loss", "mtp_loss") if name in sums}
    means = {name: total / batch.num_loss_tokens for name, total in sums.items()}
    routing = [rank.routing for rank in ranks if rank.routing is not None]
    if routing:
        num_sequences = sum(bool(sample.loss_mask.any()) for sample in batch.samples)
        means |= routing_metrics(routing, num_sequences)
    return {**means, **losses, **ranks[0].step}


def critic_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a critic's step, under names that differ from the policy's."""
    renamed = {f"critic_{name}": metrics[name] for name in ("grad_norm", "lr", "skipped_steps")}
    if "value_target" in metrics:
        renamed["value_explained_variance"] = explained_variance(metrics)
    return renamed | {name: metrics[name] for name in ("value_loss", "value_clipfrac") if name in metrics}


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 0) out of `total_steps`.

    It rises linearly and reaches lr with step lr_warmup_iters - 1, so the first step has a rate above 0;
    then it falls and reaches min_lr after the last step of the decay.
    """
    if step < config.lr_warmup_iters:
        return config.lr * (step + 1) / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    end = config.lr_decay_iters or total_steps
    if step >= end:
        return config.min_lr
    passed = (step - config.lr_warmup_iters) / (end - config.lr_warmup_iters)
    factor = 1.0 - passed if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
    return config.min_lr + (config.lr - config.min_lr) * factor
