"""The `Trainer` over ranks, from the driver's side: the same for torch and for Megatron."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from agentrl.losses import extras_used
from agentrl.runtime.activity import CHECKPOINT, LOADS_STATE, PUBLISH, SCORE, TRAIN, working
from agentrl.trainer import saved
from agentrl.trainer.batch import check_extras, check_sampled
from agentrl.trainer.plan import Plan, StepSums, Worker, critic_metrics, scored_tokens, step_metrics
from agentrl.trainer.recording import Phase, Recording
from agentrl.trainer.routing import check_routed, put_together
from agentrl.trainer.snapshots import BUCKET_BYTES, Publisher, Ranks, called
from agentrl.types import (
    REPLAYED_EXPERTS,
    UNKNOWN_EXPERT,
    Extra,
    FloatArray,
    RoutedArray,
    Sample,
    ScoreRole,
    Scores,
    TrainBatch,
)
from agentrl.types.seams import (
    PublishReport,
    StepReport,
    WeightSink,
)
from agentrl.weights.codec import unpack
from agentrl.weights.hf.adapters import low_rank_of
from agentrl.weights.hf.directory import atomic_directory
from agentrl.weights.hf.export import save_adapters, write_directory

R = TypeVar("R")

_POLL_S = 0.1
_NUM_STATISTICS = 2
"""Entropy, and the sum of squared probabilities."""


class RankTrainer:
    """Trains the model at `plan.models["old"]` on `ranks`.

    The constructor blocks until every rank has its model; `started` does not. A call that has begun runs to
    its end: a cancellation takes effect after it, so no step is half done.

    bucket_bytes: size of a bucket of weights; a larger tensor has a bucket of its own.

    Raises:
        ModelLoadError: a directory holds no model that the ranks train.
        ConfigError: the plan holds what no other process can import.
        TrainerError: a rank failed.
    """

    def __init__(self, ranks: Ranks, plan: Plan, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.ranks = ranks
        self._plan = plan
        self._streaming = asyncio.Lock()
        self._is_offloaded = False
        ranks.begin(plan)
        self.publisher = Publisher(ranks, bucket_bytes, self._streaming, plan.models["old"])
        """Sends its weights."""

    @classmethod
    async def started(cls, ranks: Ranks, plan: Plan) -> RankTrainer:
        """The trainer, once every rank has its model; raises what the constructor raises."""
        return await ranks.run(cls, ranks, plan)

    async def kernels(self) -> str | None:
        """What the ranks compute with on GPUs, in a sentence; None = on the CPU.

        Raises:
            TrainerError: a rank failed.
        """
        return (await called(self.ranks, Worker.kernels))[0]

    async def score(
        self, samples: Sequence[Sample], roles: Sequence[ScoreRole] = ("old",), *, statistics: bool = False
    ) -> Scores:
        """Logprobs of every token in each role, at each sample's temperature; values of trainable tokens.

        A first token has no prefix and gets 0. Without the role `old`, the proximal logprobs are those of
        the engine. statistics: also the entropy and the sum of squared probabilities of the role `old`.

        Raises:
            ValueError: the plan has no network in that role, or a sample was sampled greedily.
            TrainerError: a rank failed.
        """
        if missing := [role for role in roles if role not in self._plan.roles]:
            raise ValueError(f"this trainer has no network in the role `{missing[0]}`; give it one")
        check_sampled(samples)
        if self._plan.config.router_replay and "old" in roles:
            check_routed(samples, self._plan.config.router_replay)
        with working(SCORE):
            scored = {
                role: await _scored(self.ranks, samples, role, statistics and role == "old") for role in roles
            }
        engine = tuple(sample.logprobs for sample in samples)
        (proximal, *statistics_of_old), routed = scored.get("old", ([engine], None))
        entropy, squares = statistics_of_old or (None, None)
        ref, teacher, values = (
            scored[role][0][0] if role in scored else None for role in ("ref", "teacher", "values")
        )
        return Scores(proximal, ref, teacher, values, entropy, squares, routed=routed)

    async def update(self, batch: TrainBatch) -> StepReport:
        """One optimizer step of the critic, where there is one, and one of the policy.

        A gradient that is not finite is discarded: weights and optimizer stay as they were,
        train/skipped_steps (in all so far) grows by one, and the schedule advances. One that is left out
        (`ProximalInStep`) changes nothing.

        Raises:
            ValueError: no token of the batch is under a loss mask, or a sample was sampled greedily.
            UserError: the samples lack the extras that the loss uses.
            TrainerError: a rank failed.
        """
        if not batch.num_loss_tokens:
            raise ValueError("no token of the batch is under the loss mask; leave the step out")
        check_sampled(sample for sample in batch.samples if sample.loss_mask.any())
        check_extras(batch.samples, extras_used(self._plan.policy.loss))
        if self._plan.config.router_replay:
            check_routed(batch.samples, self._plan.config.router_replay)
        with working(TRAIN):
            ranks = await called(self.ranks, Worker.update, _with_replayed(batch))
        return _report(ranks, batch)

    async def move_reference(self, share: float) -> None:
        """Move the reference towards the policy: share x policy + (1 - share) x reference.

        Raises:
            ValueError: the plan has no reference, or it does not move.
            TrainerError: a rank failed.
        """
        if not self._plan.moves_reference:
            raise ValueError("the reference of this trainer does not move; give it a plan that moves it")
        await called(self.ranks, Worker.move_reference, share)

    async def publish(self, target: WeightSink, *, version: int) -> PublishReport:
        """Send the current weights in buckets, each piece of memory once.

        A `SnapshotSink` gets them from the process of rank 0; for any other sink, they pass through this one.

        Raises:
            DivergedError: a weight is not a finite number; the engine still serves its old version.
            EngineError: the engine rejected them, and still serves its old version.
            TrainerError: a rank failed.
        """
        started = time.perf_counter()
        with working(PUBLISH, f"version {version}"):
            num_bytes = await self.publisher.publish(
                target, version, keeps_memory=lambda: not self._is_offloaded
            )
        return PublishReport(version, num_bytes, time.perf_counter() - started)

    async def onload(self) -> int | None:
        """Have on the device all that a step needs, until `offload`; see `Trainer`.

        Raises:
            TrainerError: a rank failed.
        """
        self._is_offloaded = False
        replies = await called(self.ranks, Worker.onload)
        return min((free for free in replies if free is not None), default=None)

    async def offload(self) -> int:
        """Free what only a step needs; what the devices got back, of all ranks together (bytes).

        Raises:
            TrainerError: a rank failed.
        """
        # A call between two buckets of a stream would take its replies.
        async with self._streaming:
            self._is_offloaded = True
            return sum(await called(self.ranks, Worker.offload))

    async def save(self, directory: str) -> None:
        """Write a Hugging Face directory, atomically; of a policy that learns adapters, these alone.

        All files but the weights are copied from the policy's initial directory.

        Raises:
            TrainerError: a rank failed.
        """
        with working(CHECKPOINT):
            await self.ranks.run(_save, self._plan, self.publisher, Path(directory))

    async def save_state(self, directory: str) -> asyncio.Task[None]:
        """Copy weights, optimizers and steps; the task that is returned ends when the copy is on disk.

        Training may go on as soon as this returns. The directory appears whole or not at all.

        Raises:
            OSError: the disk did not take it; the task raises it.
            TrainerError: a rank failed; the task raises it, too.
        """
        is_copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        saving = _state_saved(self.ranks, self._plan, self._streaming, Path(directory), is_copied)
        task = asyncio.create_task(saving)
        await asyncio.wait([task, is_copied], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task

    async def load_state(self, directory: str) -> None:
        """Restore the state that a trainer has saved: values and means bit for bit, under any layout.

        Raises:
            ModelLoadError: the directory holds no such state.
            ConfigError: it was saved with other networks, or by another optimizer.
            TrainerError: a rank failed.
        """
        # Ranks of other machines read it under the same path.
        folder = Path(directory).resolve()
        summary = saved.read_summary(folder, self._plan)
        with working(LOADS_STATE):
            await called(self.ranks, Worker.load, folder, summary)

    async def start_recording(self, recording: Recording) -> None:
        """Record every rank from now on.

        Raises:
            TrainerError: a rank failed.
        """
        await called(self.ranks, Worker.start_recording, recording)

    async def write_recording(self, recording: Recording, phases: Sequence[Phase]) -> None:
        """End the recording; every rank writes its files. phases: of the step, in seconds since 1970.

        Raises:
            OSError: they cannot be written.
            TrainerError: a rank failed.
        """
        for error in await called(self.ranks, Worker.write_recording, recording, list(phases)):
            if isinstance(error, OSError):
                raise error

    async def close(self) -> None:
        """End the ranks."""
        await self.ranks.run(self.ranks.close)


def _with_replayed(batch: TrainBatch) -> TrainBatch:
    """The batch whose samples have the experts that its scores say."""
    routed = batch.scores.routed
    if routed is None:
        return batch
    samples = tuple(
        replace(sample, extras={**sample.extras, REPLAYED_EXPERTS: Extra.dense(rows, fill=UNKNOWN_EXPERT)})
        for sample, rows in zip(batch.samples, routed, strict=True)
    )
    return replace(batch, samples=samples, scores=replace(batch.scores, routed=None))


def _save(plan: Plan, publisher: Publisher, directory: Path) -> None:
    like = Path(plan.models["old"])
    if not publisher.adapters:
        write_directory(directory, publisher.buckets(), manifest=publisher.manifest, like=like)
        return
    # They are a small part of the weights.
    tensors = [named for bucket in publisher.buckets(publisher.adapters) for named in unpack(bucket)]
    save_adapters(directory, low_rank_of(tensors, plan.config.lora_scale), like=like)


async def _state_saved(
    ranks: Ranks, plan: Plan, streaming: asyncio.Lock, directory: Path, is_copied: asyncio.Future[None]
) -> None:
    with atomic_directory(directory) as partial:
        partial.mkdir()
        with working(CHECKPOINT):
            replies = await called(ranks, Worker.save, partial)
        is_copied.set_result(None)
        await _written(ranks, streaming)
        steps, done = replies[0]
        saved.write_summary(partial, plan, steps, done)


async def _written(ranks: Ranks, streaming: asyncio.Lock) -> None:
    """Wait until every rank has written its copy."""
    waiting = True
    while waiting:
        await asyncio.sleep(_POLL_S)
        # A call between two buckets of a stream would take its replies.
        async with streaming:
            replies = await called(ranks, Worker.is_written)
        for error in replies:
            if isinstance(error, OSError):
                raise error
        waiting = not all(replies)


def _report(ranks: Sequence[Mapping[ScoreRole, StepSums]], batch: TrainBatch) -> StepReport:
    """What all ranks report of an update."""
    metrics: dict[str, float] = {}
    if "values" in ranks[0]:
        metrics |= critic_metrics(step_metrics([rank["values"] for rank in ranks], batch))
    if "old" in ranks[0]:
        metrics |= step_metrics([rank["old"] for rank in ranks], batch)
    return StepReport(
        {f"train/{name}": value for name, value in metrics.items()},
        sum(len(sample) for sample in batch.samples),
        None if batch.in_step is None else _logprobs(ranks, batch),
        any(sums.is_left_out for rank in ranks for sums in rank.values()),
    )


def _logprobs(ranks: Sequence[Mapping[ScoreRole, StepSums]], batch: TrainBatch) -> tuple[FloatArray, ...]:
    """What the ranks report of the policy's logprobs, as one [T] array for each sample."""
    arrays = [np.zeros(len(sample), dtype=np.float32) for sample in batch.samples]
    for rank in ranks:
        for index, values in rank["old"].logprobs.items():
            arrays[index][batch.samples[index].loss_mask] = values
    return tuple(arrays)


async def _scored(
    ranks: Ranks, samples: Sequence[Sample], role: ScoreRole, statistics: bool
) -> tuple[list[tuple[FloatArray, ...]], tuple[RoutedArray, ...] | None]:
    """Logprobs or values of the role; with `statistics` also entropies and sums of squares.

    And the experts that the tokens went through, where they are kept.
    """
    replies = await called(ranks, Worker.score, samples, role, statistics)
    num_fields = 1 + _NUM_STATISTICS * statistics
    scored = [np.zeros((num_fields, len(sample)), dtype=np.float32) for sample in samples]
    for reply in replies:
        for index, values in reply.values.items():
            scored[index][:, scored_tokens(samples[index], role)] = values
    routed = [reply.routed for reply in replies if reply.routed is not None]
    fields = [tuple(rows[field] for rows in scored) for field in range(num_fields)]
    return fields, put_together(routed, samples) if routed else None
