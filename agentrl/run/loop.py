"""The one training loop: take a batch, give credit, update, publish; then the next.

Synchronous is its `max_staleness = 0` case: see `agentrl.rollout.Producer`, which alone
decides when episodes may start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentrl.algorithms.filters import split_by_signal
from agentrl.algorithms.samples import samples_of
from agentrl.protocols import AdvantageEstimator, StepReport, Trainer, WeightSink
from agentrl.rollout.group import GroupOutcome
from agentrl.rollout.producer import Producer
from agentrl.run.metrics import rollout_metrics
from agentrl.types import Group, Sample, Scores, TrainBatch


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


@dataclass(frozen=True, slots=True)
class Loop:
    """Everything one iteration needs.

    rescore: compute the old logprobs again in the trainer, rather than take the engine's own.
    """

    producer: Producer
    trainer: Trainer
    estimator: AdvantageEstimator
    sink: WeightSink
    temperature: float
    num_steps: int
    rescore: bool
    clock: Callable[[], float] = time.perf_counter

    async def iterate(self, step: int) -> Iteration:
        """Play the batch of `step`, train on it and publish version step + 1."""
        started = self.clock()
        outcomes = await self.producer.take()
        played = self.clock()
        groups = [outcome.group for outcome in outcomes if outcome.group is not None]
        trained, dropped = split_by_signal(groups)
        reports = [await self._update(chunk) for chunk in _chunks(trained, self.num_steps)]
        updated = self.clock()
        await self.trainer.publish(self.sink, version=step + 1)
        self.producer.published(step + 1)
        ended = self.clock()
        metrics = rollout_metrics(outcomes, dropped) | _averaged(reports)
        metrics |= {
            "perf/rollout_time": played - started,
            "perf/actor_train_time": updated - played,
            "perf/update_weights_time": ended - updated,
            "perf/step_time": ended - started,
            "perf/rollout_tok_per_s": _sampled_tokens(groups) / max(played - started, 1e-9),
            "perf/actor_train_tok_per_s": sum(r.num_tokens for r in reports) / max(updated - played, 1e-9),
        }
        return Iteration(step, outcomes, trained, dropped, metrics)

    async def _update(self, groups: Sequence[Group]) -> StepReport:
        samples = [
            sample
            for group in groups
            for episode in group.episodes
            for sample in samples_of(episode, temperature=self.temperature)
        ]
        scores = await self._scores(samples)
        credit = self.estimator(groups, samples, scores)
        return await self.trainer.update(TrainBatch(tuple(samples), scores, credit))

    async def _scores(self, samples: Sequence[Sample]) -> Scores:
        if self.rescore:
            return await self.trainer.score(samples)
        return Scores(old=tuple(sample.logprobs for sample in samples))


def _chunks(groups: Sequence[Group], n: int) -> list[Sequence[Group]]:
    """Up to n nearly equal runs of groups, none of them empty."""
    bounds = [len(groups) * k // n for k in range(n + 1)]
    chunks = [groups[start:end] for start, end in pairwise(bounds)]
    return [chunk for chunk in chunks if chunk]


def _averaged(reports: Sequence[StepReport]) -> dict[str, float]:
    if not reports:
        return {}
    return {name: sum(r.metrics[name] for r in reports) / len(reports) for name in reports[0].metrics}


def _sampled_tokens(groups: Sequence[Group]) -> int:
    return sum(
        len(turn.tokens.completion.token_ids)
        for group in groups
        for episode in group.episodes
        for turn in episode.turns
        if turn.tokens is not None
    )
