"""The one training loop: take a batch, make its credit once, update, publish; then the next.

Synchronous is its `max_staleness = 0` case: see `agentrl.rollout.Producer`, which alone
decides when episodes may start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.algorithms.off_policy import mismatch_metrics
from agentrl.algorithms.steps import OptimizerStep, RolloutBatch
from agentrl.assembly.algorithm import Algorithm
from agentrl.errors import UserError
from agentrl.protocols import PublishReport, StepReport, Trainer, WeightSink
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.producer import Producer
from agentrl.run.metrics import rollout_metrics
from agentrl.types import Group, Scores


@dataclass(frozen=True, slots=True)
class Iteration:
    """One turn of the loop: what was played, what was trained on, what it took.

    trained, dropped: whole groups; nothing could come of a dropped one. outcomes hold both, and the
    groups and episodes that failed. warnings: sentences for the user.
    """

    step: int
    outcomes: Sequence[GroupOutcome]
    trained: Sequence[Group]
    dropped: Sequence[Group]
    metrics: dict[str, float]
    warnings: Sequence[str] = ()


@dataclass(slots=True)
class BatchInProgress:
    """The batch that an iteration is at work on: whatever stops it, its groups are accounted for.

    trained: ids of the groups that the weights have seen.
    """

    outcomes: Sequence[GroupOutcome] = ()
    trained: set[str] = field(default_factory=set)


class _Credited(NamedTuple):
    """A batch split into optimizer steps, and the metrics of what it was credited with."""

    steps: Sequence[OptimizerStep]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Loop:
    """Everything one iteration needs.

    in_progress: the batch that is being worked on; empty between two iterations. watch: sees a correction
    that never acts.
    """

    producer: Producer
    trainer: Trainer
    algorithm: Algorithm
    sink: WeightSink
    num_steps: int
    watch: CorrectionWatch = field(default_factory=CorrectionWatch)
    clock: Callable[[], float] = time.perf_counter
    in_progress: BatchInProgress = field(default_factory=BatchInProgress)

    async def iterate(self, step: int) -> Iteration:
        """Play the batch of `step`, train on it, and publish a new version if any weight was updated."""
        started = self.clock()
        outcomes = self.in_progress.outcomes = await self.producer.take()
        played = self.clock()
        groups = [outcome.group for outcome in outcomes if outcome.group is not None]
        batch = RolloutBatch.of(groups, is_idle=self.algorithm.is_idle)
        # All of it before the first update: the old policy is the one that the whole batch began with.
        scores = await self._scores(batch)
        scored = self.clock()
        credited = self._credited(batch, scores)
        reports = [await self._update(one) for one in credited.steps]
        updated = self.clock()
        published = await self._publish() if reports else None
        self.producer.advance(step + 1, version=published.version if published else self.producer.version)
        ended = self.clock()
        trained = [group for group in groups if group.id in self.in_progress.trained]
        dropped = [group for group in groups if group.id not in self.in_progress.trained]
        metrics = rollout_metrics(outcomes) | _averaged(reports) | credited.metrics
        metrics |= {
            "train/optimizer_steps": float(len(reports)),
            "perf/rollout_time": played - started,
            "perf/log_probs_time": scored - played,
            "perf/actor_train_time": updated - scored,
            "perf/update_weights_time": ended - updated,
            "perf/update_weights_bytes": float(published.num_bytes if published else 0),
            "perf/step_time": ended - started,
            "perf/rollout_tok_per_s": _sampled_tokens(groups) / max(played - started, 1e-9),
            "perf/actor_train_tok_per_s": sum(r.num_tokens for r in reports) / max(updated - scored, 1e-9),
        }
        warnings = self.watch.warnings(metrics, num_steps=len(reports))
        self.in_progress.outcomes = ()
        self.in_progress.trained.clear()
        return Iteration(step, outcomes, trained, dropped, metrics, warnings)

    def _credited(self, batch: RolloutBatch, scores: Scores) -> _Credited:
        if not batch.tokens.samples:
            return _Credited((), {})
        algorithm, tokens = self.algorithm, batch.tokens
        try:
            known = tokens.scores(scores)
            advantages = algorithm.estimator(batch.groups, tokens, known)
            steps = batch.steps(
                scores,
                advantages,
                algorithm.weights,
                num_steps=self.num_steps,
                policy_term_only=algorithm.policy_term_only,
            )
        except ValueError as error:
            raise UserError(f"no credit can be given: {error}.") from error
        found = dict(advantages.metrics)
        if "old" in algorithm.roles:
            found |= mismatch_metrics(tokens, known)
        return _Credited(steps, {f"train/{name}": value for name, value in found.items()})

    async def _update(self, step: OptimizerStep) -> StepReport:
        report = await self.trainer.update(step.batch)
        self.in_progress.trained |= {group.id for group in step.groups}
        return report

    async def _publish(self) -> PublishReport:
        return await self.trainer.publish(self.sink, version=self.producer.version + 1)

    async def _scores(self, batch: RolloutBatch) -> Scores:
        samples = batch.tokens.samples
        if self.algorithm.roles and samples:
            return await self.trainer.score(samples, self.algorithm.roles)
        return Scores(old=tuple(sample.logprobs for sample in samples))


def _averaged(reports: Sequence[StepReport]) -> dict[str, float]:
    """The means of each metric over the steps that have it: a critic may learn alone at first."""
    values: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _sampled_tokens(groups: Sequence[Group]) -> int:
    return sum(
        len(turn.tokens.completion.token_ids)
        for group in groups
        for episode in group.episodes
        for turn in episode.turns
        if turn.tokens is not None
    )
