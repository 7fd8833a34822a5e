"""The `Trainer` over Megatron's ranks, from the driver's side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from agentrl.protocols import Bucket, PublishReport, StepReport, WeightSink
from agentrl.trainer.megatron.checkpoint import Checkpoint
from agentrl.trainer.megatron.export import write_directory
from agentrl.trainer.megatron.plan import Plan, Told
from agentrl.trainer.megatron.processes import Processes
from agentrl.types import FloatArray, Sample, ScoreRole, Scores, TrainBatch
from agentrl.weights.checksum import added_up, digests_of


class MegatronTrainer:
    """Trains the model at `plan.models["old"]` on as many processes as the layout has ranks.

    Its methods run on the caller's thread from start to end, as those of the torch trainer do.

    folder: for what the ranks print.

    Raises:
        ModelLoadError: a directory holds no model that Megatron trains.
        TrainerError: a rank does not come up.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        with Checkpoint(plan.models["old"]) as checkpoint:
            self._manifest = tuple(checkpoint.specs("bfloat16" if plan.config.bf16 else "float32"))
        self._processes = Processes(plan, folder)

    @property
    def pids(self) -> list[int]:
        """The ranks' processes."""
        return self._processes.pids

    async def score(self, samples: Sequence[Sample], roles: Sequence[ScoreRole] = ("old",)) -> Scores:
        """Logprobs of every token in each role, at each sample's temperature.

        A first token has nothing before it and gets 0. Without the role `old`, the old logprobs are those
        of the engine.

        Raises:
            ValueError: nobody here has that role.
            TrainerError: a rank failed.
        """
        if missing := [role for role in roles if role not in self._plan.models]:
            raise ValueError(f"this trainer has no network in the role `{missing[0]}`; give it one")
        scored = {role: self._scored(samples, role) for role in roles}
        engine = tuple(sample.logprobs for sample in samples)
        return Scores(old=scored.get("old", engine), ref=scored.get("ref"), teacher=scored.get("teacher"))

    async def update(self, batch: TrainBatch) -> StepReport:
        """One optimizer step over the whole batch.

        A gradient that is not finite is thrown away: weights and optimizer stay as they were,
        train/skipped_steps (in all so far) grows by one, and the schedule goes on.

        Raises:
            ValueError: no token of the batch is under a loss mask.
            TrainerError: a rank failed.
        """
        if not batch.num_loss_tokens:
            raise ValueError("no token of the batch is under the loss mask; leave the step out")
        told = cast(list[Told], self._processes.call("update", batch))
        sums: dict[str, float] = {}
        for one in told:
            for name, total in one.sums.items():
                sums[name] = sums.get(name, 0.0) + total
        means = {name: total / batch.num_loss_tokens for name, total in sums.items() if name != "loss"}
        metrics: Mapping[str, float] = {**means, "loss": sums["loss"], **told[0].step}
        return StepReport(
            {f"train/{name}": value for name, value in metrics.items()},
            sum(len(sample) for sample in batch.samples),
        )

    async def publish(self, target: WeightSink, *, version: int) -> PublishReport:
        """Send the current weights in buckets of 64 MiB, gathered from the ranks one parameter at a time.

        Raises:
            EngineError: the engine did not take them; its old version serves on.
            TrainerError: a rank failed.
        """
        started = time.perf_counter()
        num_bytes, digests = 0, list[int]()
        buckets = self._buckets()
        try:
            async with target.begin(self._manifest, version) as transaction:
                for bucket in buckets:
                    num_bytes += bucket.data.nbytes
                    digests += digests_of(bucket)
                    await transaction.put(bucket)
                await transaction.commit(added_up(digests))
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
        write_directory(Path(directory), self._buckets(), like=Path(self._plan.models["old"]))

    def close(self) -> None:
        """End the ranks."""
        self._processes.close()

    def _buckets(self) -> Iterator[Bucket]:
        return cast(Iterator[Bucket], self._processes.stream("weights"))

    def _scored(self, samples: Sequence[Sample], role: ScoreRole) -> tuple[FloatArray, ...]:
        told = cast(list[dict[int, FloatArray]], self._processes.call("score", samples, role))
        scored = [np.zeros(len(sample), dtype=np.float32) for sample in samples]
        for found in told:
            for number, logps in found.items():
                scored[number][1:] = logps
        return tuple(scored)
