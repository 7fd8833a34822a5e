"""The `Trainer` over Megatron's ranks, from the driver's side."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from agentrl.checkpoints.directory import whole_directory
from agentrl.losses import extras_used
from agentrl.protocols import Bucket, PublishReport, StepReport, WeightSink
from agentrl.trainer.megatron.files import saved
from agentrl.trainer.megatron.files.checkpoint import Checkpoint
from agentrl.trainer.megatron.files.export import write_directory
from agentrl.trainer.megatron.launch.guests import Guests
from agentrl.trainer.megatron.launch.processes import Processes
from agentrl.trainer.megatron.plan import Done, Plan, Told, scored_tokens
from agentrl.trainer.torch.batch import check_extras, check_sampled
from agentrl.trainer.torch.critic import critic_metrics
from agentrl.types import FloatArray, Sample, ScoreRole, Scores, TrainBatch


class MegatronTrainer:
    """Trains the model at `plan.models["old"]` on as many processes as the layout has ranks.

    Its methods run on the caller's thread from start to end, as those of the torch trainer do.

    folder: for what the ranks print. guests: those that a launcher started.
    bucket_bytes: of weights that are sent at once; a larger tensor is, too.

    Raises:
        ModelLoadError: a directory holds no model that Megatron trains.
        TrainerError: a rank does not come up.
    """

    def __init__(
        self, plan: Plan, folder: Path, guests: Guests | None = None, *, bucket_bytes: int = 64 << 20
    ) -> None:
        self._plan = plan
        self._bucket_bytes = bucket_bytes
        with Checkpoint(plan.models["old"]) as checkpoint:
            self._manifest = tuple(checkpoint.specs("bfloat16" if plan.config.bf16 else "float32"))
        self._processes = Processes(plan, folder, guests)

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return self._processes.pids

    async def score(self, samples: Sequence[Sample], roles: Sequence[ScoreRole] = ("old",)) -> Scores:
        """Logprobs of every token in each role, at each sample's temperature; values of trainable tokens.

        A first token has nothing before it and gets 0. Without the role `old`, the old logprobs are those
        of the engine.

        Raises:
            ValueError: nobody here has that role, or a sample was sampled greedily.
            TrainerError: a rank failed.
        """
        if missing := [role for role in roles if role not in self._plan.roles]:
            raise ValueError(f"this trainer has no network in the role `{missing[0]}`; give it one")
        check_sampled(samples)
        scored = {role: self._scored(samples, role) for role in roles}
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
        told = cast(list[Mapping[ScoreRole, Told]], self._processes.call("update", batch))
        metrics: dict[str, float] = {}
        if "values" in told[0]:
            metrics |= critic_metrics(_metrics([one["values"] for one in told], batch))
        if "old" in told[0]:
            metrics |= _metrics([one["old"] for one in told], batch)
        return StepReport(
            {f"train/{name}": value for name, value in metrics.items()},
            sum(len(sample) for sample in batch.samples),
        )

    async def publish(self, target: WeightSink, *, version: int) -> PublishReport:
        """Send the current weights in buckets, gathered from the ranks one parameter at a time.

        Raises:
            EngineError: the engine did not take them; its old version serves on.
            TrainerError: a rank failed.
        """
        started = time.perf_counter()
        num_bytes, buckets = 0, self._buckets()
        try:
            async with target.begin(self._manifest, version) as transaction:
                for bucket in buckets:
                    num_bytes += bucket.data.nbytes
                    await transaction.put(bucket)
                    # Whatever the sink does not keep is filled again.
                    del bucket
                await transaction.commit(buckets.checksum)
        finally:
            # Where the engine broke off, the ranks are still sending.
            for _ in buckets:
                pass
        return PublishReport(version, num_bytes, time.perf_counter() - started)

    def save(self, directory: str) -> None:
        """Write a Hugging Face directory that appears whole or not at all.

        Raises:
            TrainerError: a rank failed.
        """
        write_directory(
            Path(directory),
            self._buckets(),
            manifest=self._manifest,
            like=Path(self._plan.models["old"]),
        )

    def save_state(self, directory: str) -> None:
        """Write all that the trainer knows: weights, optimizers, steps. It appears whole or not at all.

        Raises:
            TrainerError: a rank failed.
        """
        with whole_directory(Path(directory)) as coming:
            saved.begin(coming, self._plan)
            told = cast(list[tuple[int, dict[ScoreRole, Done]]], self._processes.call("save", coming))
            saved.finish(coming, self._plan, *told[0])

    def load_state(self, directory: str) -> None:
        """Go on, bit for bit, from what a trainer with the same layout has saved.

        Raises:
            ModelLoadError: there is nothing of the kind.
            ConfigError: it was saved under another layout, or with other networks.
            TrainerError: a rank failed.
        """
        # Ranks of other machines find it under the same path.
        folder = Path(directory).resolve()
        self._processes.call("load", folder, *saved.opened(folder, self._plan))

    def close(self) -> None:
        """End the ranks."""
        self._processes.close()

    def _buckets(self) -> _Weights:
        return _Weights(self._processes.stream("weights", self._manifest, self._bucket_bytes))

    def _scored(self, samples: Sequence[Sample], role: ScoreRole) -> tuple[FloatArray, ...]:
        told = cast(list[dict[int, FloatArray]], self._processes.call("score", samples, role))
        scored = [np.zeros(len(sample), dtype=np.float32) for sample in samples]
        for found in told:
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
            # A stream that is at its end already says nothing.
            self.checksum = end.value or self.checksum
            raise


def _metrics(told: Sequence[Told], batch: TrainBatch) -> dict[str, float]:
    """Of one network, put together from what all ranks tell."""
    sums: dict[str, float] = {}
    for one in told:
        for name, total in one.sums.items():
            sums[name] = sums.get(name, 0.0) + total
    means = {name: total / batch.num_loss_tokens for name, total in sums.items() if name != "loss"}
    return {**means, "loss": sums["loss"], **told[0].step}
