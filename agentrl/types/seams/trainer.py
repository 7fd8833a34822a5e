"""Trainers: what scores samples, and updates weights."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import NamedTuple, Protocol

from agentrl.types import (
    FloatArray,
    Sample,
    ScoreRole,
    Scores,
    TrainBatch,
)
from agentrl.types.seams.weights import WeightSink


class StepReport(NamedTuple):
    """The report of one optimizer step: metrics by name (train/...), and its tokens (count).

    logprobs: where the batch has them taken `in_step`, those of the policy before the update, one float32 [T]
    array for each sample, 0 off its loss mask; otherwise None. is_left_out: see `ProximalInStep`.
    """

    metrics: Mapping[str, float]
    num_tokens: int
    logprobs: tuple[FloatArray, ...] | None = None
    is_left_out: bool = False


class PublishReport(NamedTuple):
    """The report of one delivery of weights: its version, its size (bytes), its wall time (seconds)."""

    version: int
    num_bytes: int
    seconds: float


class Trainer(Protocol):
    """Updates weights by samples and their credit.

    None of its calls blocks the event loop: meanwhile replies arrive, tools run, deadlines hold. A call that
    has begun goes on to its end; a cancellation takes effect after it.
    """

    async def score(
        self, samples: Sequence[Sample], roles: Sequence[ScoreRole] = ("old",), *, statistics: bool = False
    ) -> Scores:
        """Logprobs of every token in each role (nats), at each sample's temperature, and the critic's values.

        `old`: of the current weights, else the engine's. statistics: also entropies and sums of squares.
        """

    async def update(self, batch: TrainBatch) -> StepReport:
        """One optimizer step over the whole batch, however it is split into micro-batches."""

    async def move_reference(self, share: float) -> None:
        """Move the reference to share x policy + (1 - share) x reference."""

    async def publish(self, target: WeightSink, *, version: int) -> PublishReport:
        """Send the current weights to `target` as `version`."""

    async def onload(self) -> int | None:
        """Have on the device all that a step needs, until `offload`; other calls onload what they need.

        The result is the device's free memory before, on the rank with least (bytes); None: it is the CPU.
        """

    async def offload(self) -> int:
        """Free the memory that is needed by a step only; returns what the device got back (bytes)."""

    async def save(self, directory: str) -> None:
        """Write a Hugging Face model directory, atomically."""

    async def save_state(self, directory: str) -> Awaitable[None]:
        """Copy weights, optimizers and steps; what is returned ends when the copy is a directory, atomically.

        Training may go on meanwhile.
        """

    async def load_state(self, directory: str) -> None:
        """Go on from what a trainer with the same settings has saved."""

    async def close(self) -> None:
        """End all that it has started. Nothing may be called afterwards."""


class Teacher(Protocol):
    """Scores the policy's own tokens, for on-policy distillation."""

    @property
    def uses_trainer(self) -> bool:
        """Whether it scores by the trainer; if not, both may score at the same time."""

    async def logprobs(self, samples: Sequence[Sample], trainer: Trainer) -> tuple[FloatArray, ...]:
        """The teacher's logprobs of the sampled tokens, [T] for each sample (nats); others are not used."""
