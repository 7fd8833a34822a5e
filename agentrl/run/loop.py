"""The one training loop: take a batch, give credit, update, publish; then the next.

Synchronous is its `max_staleness = 0` case: see `agentrl.rollout.Producer`, which alone
decides when episodes may start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from agentrl.algorithms.filters import Split, split_by_signal
from agentrl.algorithms.off_policy import mismatch_metrics
from agentrl.algorithms.samples import samples_of
from agentrl.errors import UserError
from agentrl.protocols import AdvantageEstimator, StepReport, Trainer, WeightSink
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.producer import Producer
from agentrl.run.metrics import rollout_metrics
from agentrl.types import Group, Sample, ScoreRole, Scores, TrainBatch


@dataclass(frozen=True, slots=True)
class Iteration:
    """One turn of the loop: what was played, what was trained on, what it took.

    trained, dropped: whole groups; a dropped one had no signal. outcomes hold both, and the
    groups and episodes that failed.
    """

    step: int
    outcomes: Sequence[GroupOutcome]
    trained: Sequence[Group]
    dropped: Sequence[Group]
    metrics: dict[str, float]


@dataclass(slots=True)
class Hand:
    """The batch that an iteration is at work on: whatever stops it, its groups are accounted for.

    trained: ids of the groups that the weights have seen.
    """

    outcomes: Sequence[GroupOutcome] = ()
    trained: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Loop:
    """Everything one iteration needs.

    hand: what is being worked on; empty between two iterations.
    split: sets aside the groups that are not worth a gradient.
    roles: what the trainer scores before credit is given; without `old`, the old logprobs are the engine's.
    """

    producer: Producer
    trainer: Trainer
    estimator: AdvantageEstimator
    sink: WeightSink
    temperature: float
    num_steps: int
    split: Callable[[Sequence[Group]], Split] = split_by_signal
    roles: Sequence[ScoreRole] = ()
    clock: Callable[[], float] = time.perf_counter
    hand: Hand = field(default_factory=Hand)

    async def iterate(self, step: int) -> Iteration:
        """Play the batch of `step`, train on it and publish version step + 1."""
        started = self.clock()
        outcomes = self.hand.outcomes = await self.producer.take()
        played = self.clock()
        groups = [outcome.group for outcome in outcomes if outcome.group is not None]
        trained, dropped = self.split(groups)
        steps = [(chunk, self._samples(chunk)) for chunk in _chunks(trained, self.num_steps)]
        # All of it before the first update: the old policy is the one that the whole batch began with.
        scores = [await self._scores(samples) for _, samples in steps]
        scored = self.clock()
        reports = [
            await self._update(chunk, samples, known)
            for (chunk, samples), known in zip(steps, scores, strict=True)
        ]
        updated = self.clock()
        published = await self.trainer.publish(self.sink, version=step + 1)
        self.producer.published(step + 1)
        ended = self.clock()
        metrics = rollout_metrics(outcomes, dropped) | _averaged(reports)
        metrics |= {
            "perf/rollout_time": played - started,
            "perf/log_probs_time": scored - played,
            "perf/actor_train_time": updated - scored,
            "perf/update_weights_time": ended - updated,
            "perf/update_weights_bytes": float(published.num_bytes),
            "perf/step_time": ended - started,
            "perf/rollout_tok_per_s": _sampled_tokens(groups) / max(played - started, 1e-9),
            "perf/actor_train_tok_per_s": sum(r.num_tokens for r in reports) / max(updated - scored, 1e-9),
        }
        self.hand.outcomes = ()
        self.hand.trained.clear()
        return Iteration(step, outcomes, trained, dropped, metrics)

    def _samples(self, groups: Sequence[Group]) -> tuple[Sample, ...]:
        return tuple(
            sample
            for group in groups
            for episode in group.episodes
            for sample in samples_of(episode, temperature=self.temperature)
        )

    async def _update(
        self, groups: Sequence[Group], samples: tuple[Sample, ...], scores: Scores
    ) -> StepReport:
        try:
            credit = self.estimator(groups, samples, scores)
        except ValueError as error:
            raise UserError(f"no credit can be given: {error}.") from error
        report = await self.trainer.update(TrainBatch(samples, scores, credit))
        self.hand.trained |= {group.id for group in groups}
        found = dict(credit.metrics)
        if "old" in self.roles:
            found |= mismatch_metrics(samples, scores)
        return report._replace(metrics={**report.metrics, **{f"train/{n}": x for n, x in found.items()}})

    async def _scores(self, samples: Sequence[Sample]) -> Scores:
        if self.roles:
            return await self.trainer.score(samples, self.roles)
        return Scores(old=tuple(sample.logprobs for sample in samples))


def _chunks(groups: Sequence[Group], n: int) -> list[Sequence[Group]]:
    """Up to n nearly equal runs of groups, none of them empty."""
    bounds = [len(groups) * k // n for k in range(n + 1)]
    chunks = [groups[start:end] for start, end in pairwise(bounds)]
    return [chunk for chunk in chunks if chunk]


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
