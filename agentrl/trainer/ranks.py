"""The `Trainer` over ranks, from the driver's side: the same for torch and for Megatron."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, cast

import numpy as np

from agentrl.checkpoints.directory import whole_directory
from agentrl.checkpoints.export import write_directory
from agentrl.losses import extras_used
from agentrl.protocols import Bucket, PublishReport, StepReport, TensorSpec, WeightSink
from agentrl.trainer import saved
from agentrl.trainer.batch import check_extras, check_sampled
from agentrl.trainer.launch.work import Work
from agentrl.trainer.plan import Done, Plan, StepSums, critic_metrics, scored_tokens, step_metrics
from agentrl.types import FloatArray, Sample, ScoreRole, Scores, TrainBatch

R = TypeVar("R")

BUCKET_BYTES = 64 << 20


class Ranks(Protocol):
    """Where the workers of a plan are: in processes of their own, or in this one. Its calls block."""

    @property
    def pids(self) -> list[int]:
        """The processes, in the order of the ranks."""

    def begin(self, plan: Work) -> None:
        """Have every rank work on a plan; what it worked on before is gone.

        Raises:
            ConfigError: the plan holds what no other process can import.
            TrainerError: a rank failed.
        """

    def call(self, method: str, *args: object) -> list[object]:
        """Call a method of every rank's `Worker`; what each answers, in the order of the ranks."""

    def stream(self, method: str, *args: object) -> Generator[Bucket, None, object]:
        """Buckets of rank 0, one at a time, to their end; returns what the method of rank 0 returned."""

    async def run(self, function: Callable[..., R], *args: object) -> R:
        """Run a function that makes such calls, so that the event loop goes on where it can."""

    def close(self) -> None:
        """End all ranks."""


class RankTrainer:
    """Trains the model at `plan.models["old"]` on the ranks that it is given.

    The constructor blocks until every rank has its model; `started` does not. A call that has begun goes on
    to its end: a cancellation takes effect after it, so no half step is left behind.

    bucket_bytes: of weights that are sent at once; a larger tensor is, too.

    Raises:
        ModelLoadError: a directory holds no model that the ranks train.
        ConfigError: the plan holds what no other process can import.
        TrainerError: a rank failed.
    """

    def __init__(self, ranks: Ranks, plan: Plan, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.ranks = ranks
        self._plan = plan
        self._bucket_bytes = bucket_bytes
        ranks.begin(plan)
        self._manifest = cast(tuple[TensorSpec, ...], ranks.call("manifest")[0])

    @classmethod
    async def started(cls, ranks: Ranks, plan: Plan) -> RankTrainer:
        """The trainer, once every rank has its model; raises what the constructor raises."""
        return await ranks.run(cls, ranks, plan)

    async def score(self, samples: Sequence[Sample], roles: Sequence[ScoreRole] = ("old",)) -> Scores:
        """Logprobs of every token in each role, at each sample's temperature; values of trainable tokens.

        A first token has nothing before it and gets 0. Without the role `old`, the old logprobs are those
        of the engine.

        Raises:
            ValueError: no network here has that role, or a sample was sampled greedily.
            TrainerError: a rank failed.
        """
        if missing := [role for role in roles if role not in self._plan.roles]:
            raise ValueError(f"this trainer has no network in the role `{missing[0]}`; give it one")
        check_sampled(samples)
        scored = {role: await self._scored(samples, role) for role in roles}
        engine = tuple(sample.logprobs for sample in samples)
        return Scores(
            old=scored.get("old", engine),
            ref=scored.get("ref"),
            teacher=scored.get("teacher"),
            values=scored.get("values"),
        )

    async def update(self, batch: TrainBatch) -> StepReport:
        """One optimizer step of the critic, where there is one, and one of the policy.

        A gradient that is not finite is thrown away: weights and optimizer stay as they were,
        train/skipped_steps (in all so far) grows by one, and the schedule goes on.

        Raises:
            ValueError: no token of the batch is under a loss mask, or a sample was sampled greedily.
            UserError: the engine does not give the extras that the loss uses.
            TrainerError: a rank failed.
        """
        if not batch.num_loss_tokens:
            raise ValueError("no token of the batch is under the loss mask; leave the step out")
        check_sampled(sample for sample in batch.samples if sample.loss_mask.any())
        check_extras(batch.samples, extras_used(self._plan.policy.loss))
        answers = await self.ranks.run(self.ranks.call, "update", batch)
        ranks = cast(list[Mapping[ScoreRole, StepSums]], answers)
        metrics: dict[str, float] = {}
        if "values" in ranks[0]:
            metrics |= critic_metrics(step_metrics([rank["values"] for rank in ranks], batch))
        if "old" in ranks[0]:
            metrics |= step_metrics([rank["old"] for rank in ranks], batch)
        return StepReport(
            {f"train/{name}": value for name, value in metrics.items()},
            sum(len(sample) for sample in batch.samples),
        )

    async def publish(self, target: WeightSink, *, version: int) -> PublishReport:
        """Send the current weights in buckets, each piece of memory once.

        Raises:
            EngineError: the engine did not take them; its old version serves on.
            TrainerError: a rank failed.
        """
        started = time.perf_counter()
        num_bytes, buckets = 0, self._buckets()
        try:
            async with target.begin(self._manifest, version) as transaction:
                while (bucket := await self.ranks.run(next, buckets, None)) is not None:
                    num_bytes += bucket.data.nbytes
                    await transaction.put(bucket)
                    # Whatever the sink does not keep is filled again.
                    del bucket
                await transaction.commit(buckets.checksum)
        finally:
            # Where the engine broke off, the ranks are still sending.
            await self.ranks.run(buckets.drain)
        return PublishReport(version, num_bytes, time.perf_counter() - started)

    async def save(self, directory: str) -> None:
        """Write a Hugging Face directory that appears whole or not at all.

        All but the weights is copied from the directory that the policy began with.

        Raises:
            TrainerError: a rank failed.
        """
        await self.ranks.run(self._save, Path(directory))

    async def save_state(self, directory: str) -> None:
        """Write all that the trainer knows: weights, optimizers, steps. It appears whole or not at all.

        Raises:
            TrainerError: a rank failed.
        """
        await self.ranks.run(self._save_state, Path(directory))

    async def load_state(self, directory: str) -> None:
        """Go on, bit for bit, from what a trainer with the same layout has saved.

        Raises:
            ModelLoadError: there is nothing of the kind.
            ConfigError: it was saved under another layout, or with other networks.
            TrainerError: a rank failed.
        """
        # Ranks of other machines find it under the same path.
        folder = Path(directory).resolve()
        steps, done = saved.opened(folder, self._plan)
        await self.ranks.run(self.ranks.call, "load", folder, steps, done)

    async def close(self) -> None:
        """End the ranks."""
        await self.ranks.run(self.ranks.close)

    def _buckets(self) -> _Weights:
        return _Weights(self.ranks.stream("weights", self._manifest, self._bucket_bytes))

    def _save(self, directory: Path) -> None:
        like = Path(self._plan.models["old"])
        write_directory(directory, self._buckets(), manifest=self._manifest, like=like)

    def _save_state(self, directory: Path) -> None:
        with whole_directory(directory) as coming:
            coming.mkdir()
            answers = self.ranks.call("save", coming)
            steps, done = cast(list[tuple[int, dict[ScoreRole, Done]]], answers)[0]
            saved.finish(coming, self._plan, steps, done)

    async def _scored(self, samples: Sequence[Sample], role: ScoreRole) -> tuple[FloatArray, ...]:
        answers = await self.ranks.run(self.ranks.call, "score", samples, role)
        scored = [np.zeros(len(sample), dtype=np.float32) for sample in samples]
        for found in cast(list[dict[int, FloatArray]], answers):
            for number, values in found.items():
                scored[number][scored_tokens(samples[number], role)] = values
        return tuple(scored)


class _Weights:
    """The weights in buckets, as they come. checksum: of all tensors, once they have come."""

    def __init__(self, stream: Generator[Bucket, None, object]) -> None:
        self._stream = stream
        self.checksum = 0

    def __iter__(self) -> _Weights:
        return self

    def __next__(self) -> Bucket:
        try:
            return next(self._stream)
        except StopIteration as end:
            # A stream that has ended before returns nothing.
            self.checksum = end.value or self.checksum
            raise

    def drain(self) -> None:
        """Take the rest, and look at none of it."""
        for _ in self:
            pass
