"""The training loop: take a batch, compute its credit once, update, publish; then the next.

consumes    batches of a `Producer`, which decides when groups start, and which of them make a batch
waits for   a batch; then the trainer (score, update, publish). Its own tasks go on meanwhile: at
            `max_staleness` 0 nothing is in flight then, above it groups are played
unblocked   by the ends of groups, and by the trainer's replies
at its end  whatever stopped it: the producer is closed by its owner, `in_progress` holds the batch
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.algorithms.laws import TokenLaws
from agentrl.algorithms.steps import OptimizerStep, RolloutBatch
from agentrl.assembly.algorithm import Algorithm
from agentrl.errors import TokenLawError
from agentrl.rollout.batch_functions import BatchFunctions
from agentrl.rollout.cadence import Cadence, MovingReference, Publishing, Times
from agentrl.rollout.group import LEFT_OUT, GroupOutcome
from agentrl.rollout.producer import Rollouts
from agentrl.run.colocation import Colocation
from agentrl.run.credit import NO_CREDIT, Credited, Crediting
from agentrl.run.data_buffer import DataBuffer, Kept, data_buffer_metrics
from agentrl.run.metrics import mean_score, rollout_metrics, staleness_metrics
from agentrl.runtime.activity import TAKE, working
from agentrl.trainer.recording import Phase
from agentrl.types import FloatArray, Group, RolloutId
from agentrl.types.seams import PublishReport, StepReport, Trainer, WeightSink
from agentrl.weights.hf.source import Operations


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of the loop: the groups that were played, those that were trained on, metrics.

    trained, dropped: complete groups; a dropped one had no gradient. recorded: complete groups of a run that
    only plays. outcomes hold all of these, and the groups and episodes that failed. warnings: sentences for
    the user. phases: in their order, by the loop's clock. removed: rollouts that a filter took out of the
    loss, each with the reason. advantages: of the rollouts that have some, as in `Entry`.
    """

    step: int
    outcomes: Sequence[GroupOutcome]
    trained: Sequence[Group]
    dropped: Sequence[Group]
    metrics: dict[str, float]
    warnings: Sequence[str] = ()
    phases: Sequence[Phase] = ()
    removed: Mapping[RolloutId, str] = field(default_factory=dict)
    recorded: Sequence[Group] = ()
    advantages: Mapping[RolloutId, FloatArray] = field(default_factory=dict)


@dataclass(slots=True)
class BatchInProgress:
    """The batch of the current iteration, so that its groups are journalled whatever stops the iteration.

    trained: ids of the groups of finished optimizer steps. removed, advantages: see `Iteration`. reason: why
    the others are dropped, where that is more than the end of the run. has_new_weights: the trainer's weights
    are newer than the published ones. is_training: its first update has begun.
    """

    outcomes: Sequence[GroupOutcome] = ()
    trained: set[str] = field(default_factory=set)
    removed: Mapping[RolloutId, str] = field(default_factory=dict)
    reason: str = ""
    advantages: Mapping[RolloutId, FloatArray] = field(default_factory=dict)
    has_new_weights: bool = False
    is_training: bool = False

    def end(self) -> None:
        """Its iteration has ended: nothing of it is left to journal."""
        self.outcomes, self.removed, self.advantages = (), {}, {}
        self.trained.clear()
        self.is_training = False


@dataclass(frozen=True, slots=True)
class Loop:
    """The parts that an iteration uses.

    num_steps, num_epochs: most optimizer steps of a pass over a batch, and passes. in_progress: the current
    batch; empty between two iterations. watch: warns of a correction without effect.
    laws: every trajectory is checked by them before it is scored or trained on. functions: of the user, of a
    whole batch; None = there are none.
    sink: None = nothing serves the policy, and no weights are published. publishing: when they are.
    overlaps: groups are played meanwhile, so their tokens are of the whole iteration. colocation: the turns
    of engine and trainer, where they share devices. moving: the reference; None = it does not move.
    critic_only: only the critic learns. data_buffer: groups of earlier batches; None = none are kept.
    operations: of the policy; None = they are not counted. ranks: of the trainer (count). peak: of a rank's
    GPU (FLOP/s); None = it is not known. resets_optimizer: its means begin anew with each batch.
    """

    producer: Rollouts
    trainer: Trainer
    algorithm: Algorithm
    sink: WeightSink | None
    num_steps: int
    num_epochs: int = 1
    watch: CorrectionWatch = field(default_factory=CorrectionWatch)
    laws: TokenLaws = field(default_factory=TokenLaws)
    clock: Callable[[], float] = time.perf_counter
    in_progress: BatchInProgress = field(default_factory=BatchInProgress)
    functions: BatchFunctions | None = None
    publishing: Publishing = field(default_factory=Publishing)
    overlaps: bool = False
    colocation: Colocation = field(default_factory=Colocation)
    moving: MovingReference | None = None
    critic_only: bool = False
    data_buffer: DataBuffer | None = None
    operations: Operations | None = None
    ranks: int = 1
    peak: float | None = None
    resets_optimizer: bool = False

    @property
    def version(self) -> int:
        """The version of the trainer's weights, published or not."""
        return self.producer.version + self.in_progress.has_new_weights

    @property
    def cadence(self) -> Cadence:
        """The order of an iteration."""
        return Cadence(self.producer, self.publishing, self.colocation, self.clock)

    async def iterate(self, step: int) -> Iteration:
        """Play the batch of `step`, train on it, and publish a new version if weights were updated.

        Raises:
            TokenLawError: a trajectory breaks a token law; nothing of the batch is trained on.
        """
        training = IterationTraining(self, step)
        times, published = await self.cadence.iterate(step, training)
        return training.iteration(times, published)


@dataclass(slots=True)
class IterationTraining:
    """The training of the batch of one iteration, and what is known of it afterwards.

    groups: complete ones, and those of the data buffer, `reused`. removed: see `Iteration`. staleness:
    metrics, before the updates of the batch. reports: of the optimizer steps that were not left out. flops:
    operations of the policy's passes in these. unprocessed: the outcomes with the scores before a function
    changed them; None = there is none that does.
    """

    loop: Loop
    step: int
    outcomes: Sequence[GroupOutcome] = ()
    groups: Sequence[Group] = ()
    staleness: dict[str, float] = field(default_factory=dict)
    reports: Sequence[StepReport] = ()
    unprocessed: Sequence[GroupOutcome] | None = None
    reused: Sequence[Kept] = ()
    flops: float = 0.0
    batch: RolloutBatch = field(init=False)
    credited: Credited = NO_CREDIT

    @property
    def has_new_weights(self) -> bool:
        """Whether the trainer's weights are newer than the published ones."""
        return self.loop.in_progress.has_new_weights

    async def receive(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Account for the batch, and check it."""
        self.outcomes = self.loop.in_progress.outcomes = outcomes
        if self.loop.data_buffer is not None:
            self.reused = await self.loop.data_buffer.take()
        await self._check([*self.played, *(kept.group for kept in self.reused)])
        # Of a batch that was played beside the training of others; before its own updates.
        if self.loop.algorithm.max_staleness is not None:
            self.staleness = staleness_metrics(self.played, version=self.loop.producer.version)

    async def choose(self, groups: Sequence[Group]) -> None:
        """Train on these groups in place of all that were received: fewer, others, or with other verdicts."""
        chosen = {group.id: group for group in groups}
        self.outcomes = self.loop.in_progress.outcomes = [
            outcome
            if outcome.kept is None
            else replace(
                outcome,
                group=chosen.get(outcome.kept.id, outcome.kept),
                reason="" if outcome.kept.id in chosen else LEFT_OUT,
            )
            for outcome in self.outcomes
        ]
        await self._check(groups)

    async def score(self) -> None:
        """The credit, as far as it is known before the first update, of the scores that count."""
        functions = self.loop.functions
        if functions is not None and functions.post_process is not None:
            self.unprocessed = self.outcomes
            # Those of the data buffer have been processed before.
            reused = {kept.group.id for kept in self.reused}
            processed = await functions.scored([group for group in self.groups if group.id not in reused])
            await self.choose([*processed, *(group for group in self.groups if group.id in reused)])
        self.credited = await self._crediting.before(self.batch)

    async def update(self) -> None:
        """All optimizer steps; then the reference moves, where that is due."""
        in_progress, moving = self.loop.in_progress, self.loop.moving
        in_progress.advantages = self.credited.advantages
        epochs = [self.credited.steps] * self.loop.num_epochs
        reports = [await self._update(one) for steps in epochs for one in steps]
        self.credited = self._crediting.after(self.batch, self.credited, reports)
        in_progress.trained &= self.credited.trained
        in_progress.advantages = self.credited.advantages
        self.reports = [report for report in reports if not report.is_left_out]
        if moving is not None and moving.is_due(self.step):
            await self.loop.trainer.move_reference(moving.share)

    async def publish(self, version: int) -> PublishReport:
        """Send the weights to the sink, where there is one."""
        loop, report = self.loop, PublishReport(version, 0, 0.0)
        if loop.sink is not None:
            report = await loop.trainer.publish(loop.sink, version=version)
        loop.in_progress.has_new_weights = False
        if loop.functions is not None:
            await loop.functions.published(report)
        return report

    def iteration(self, times: Times, published: PublishReport | None) -> Iteration:
        """The iteration, which has ended: nothing of it is in progress any more."""
        loop, reports, groups = self.loop, self.reports, self.played
        in_progress = loop.in_progress
        ids = {verdict.rollout_id for group in groups for verdict in group.verdicts}
        removed = {id: reason for id, reason in in_progress.removed.items() if id in ids}
        trained = [group for group in groups if group.id in in_progress.trained]
        dropped = [group for group in groups if group.id not in in_progress.trained]
        metrics = rollout_metrics(self.unprocessed or self.outcomes, removed)
        metrics |= self.staleness | self.report_metrics
        if loop.data_buffer is not None:
            loop.data_buffer.add(self.step + 1, trained)
            metrics |= data_buffer_metrics(self.reused, loop.data_buffer, step=self.step + 1)
        if self.unprocessed is not None:
            metrics["rollout/rewards"] = mean_score(self.outcomes)
        phases = _phases(times)
        metrics |= self.credited.metrics | _seconds(phases) | loop.colocation.take_metrics()
        playing_s = (times.ended if loop.overlaps else times.played) - times.started
        training_s = times.updated - times.scored
        metrics |= {
            "train/optimizer_steps": float(len(reports)),
            "perf/update_weights_bytes": float(published.num_bytes if published else 0),
            "perf/rollout_tok_per_s": _per_second(_sampled_tokens(groups), playing_s),
            "perf/actor_train_tok_per_s": _per_second(sum(r.num_tokens for r in reports), training_s),
        }
        if self.flops:
            of_rank = _per_second(self.flops, training_s) / loop.ranks
            metrics["perf/actor_train_tflops"] = of_rank / 1e12
            if loop.peak is not None:
                metrics["perf/actor_train_mfu"] = of_rank / loop.peak
        if not loop.critic_only:
            loop.algorithm.controls.observe(groups, metrics)
        warnings = loop.watch.warnings(metrics, num_steps=len(reports))
        in_progress.end()
        return Iteration(
            *(self.step, self.outcomes, trained, dropped, metrics, warnings, phases, removed),
            advantages=self.credited.advantages,
        )

    @property
    def played(self) -> list[Group]:
        """The groups that were played for this batch."""
        return [outcome.kept for outcome in self.outcomes if outcome.kept is not None]

    @property
    def report_metrics(self) -> dict[str, float]:
        """The mean of each metric over the optimizer steps."""
        return _averaged(self.reports)

    async def _check(self, groups: Sequence[Group]) -> None:
        self.groups, functions = groups, self.loop.functions
        removed = {} if functions is None else await functions.removed_of(groups)
        self.loop.in_progress.removed = removed
        self.batch = self._checked(removed)
        if functions is not None:
            self.batch = await functions.converted(self.batch)

    @property
    def _crediting(self) -> Crediting:
        loop = self.loop
        is_one_step = loop.num_steps * loop.num_epochs == 1 and not loop.critic_only
        return Crediting(loop.trainer, loop.algorithm, loop.num_steps, is_one_step, loop.clock)

    def _checked(self, removed: Collection[RolloutId]) -> RolloutBatch:
        """The batch of the groups, which obey the token laws."""
        loop, version = self.loop, self.loop.producer.version
        try:
            loop.laws.check_episodes(self.groups, version=version)
            batch = RolloutBatch.of(
                self.groups,
                is_idle=loop.algorithm.is_idle,
                removed=removed,
                masks_older=loop.algorithm.masks_older,
                version=version,
            )
            loop.laws.check_samples(self.groups, batch.played)
        except TokenLawError as error:
            loop.in_progress.reason = f"token_law_{error.law}"
            raise
        return batch

    async def _update(self, step: OptimizerStep) -> StepReport:
        loop = self.loop
        batch = replace(step.batch, critic_only=True) if loop.critic_only else step.batch
        if loop.resets_optimizer and not loop.in_progress.is_training:
            batch = replace(batch, resets_optimizer=True)
        loop.in_progress.is_training = True
        report = await loop.trainer.update(batch)
        if not report.is_left_out:
            loop.in_progress.trained |= {group.id for group in step.groups}
            loop.in_progress.has_new_weights = True
            lengths = [len(sample) for sample in batch.samples]
            if loop.operations is not None and not batch.critic_only:
                self.flops += 3 * loop.operations.forward(lengths, batch.num_loss_tokens)
        return report


@dataclass(frozen=True, slots=True)
class PlayLoop:
    """The parts of an iteration that only plays: the batch is recorded, the policy stays as it is."""

    producer: Rollouts
    clock: Callable[[], float] = time.perf_counter
    in_progress: BatchInProgress = field(default_factory=BatchInProgress)
    colocation: Colocation = field(default_factory=Colocation)
    data_buffer: DataBuffer | None = None
    functions: BatchFunctions | None = None

    @property
    def version(self) -> int:
        """The version that is served."""
        return self.producer.version

    async def iterate(self, step: int) -> Iteration:
        """Play the batch of `step`."""
        started = self.clock()
        with working(TAKE):
            outcomes = self.in_progress.outcomes = await self.producer.take()
        seconds = self.clock() - started
        self.producer.advance(step + 1, version=self.producer.version)
        groups = [outcome.kept for outcome in outcomes if outcome.kept is not None]
        metrics = rollout_metrics(outcomes) | {
            "perf/rollout_time": seconds,
            "perf/step_time": seconds,
            "perf/rollout_tok_per_s": _per_second(_sampled_tokens(groups), seconds),
        }
        self.in_progress.outcomes = ()
        return Iteration(step, outcomes, (), (), metrics, recorded=groups)


def _phases(times: Times) -> tuple[Phase, ...]:
    """The phases of an iteration, in their order."""
    names = ("rollout", "log_probs", "actor_train", "update_weights")
    return tuple(Phase(name, *span) for name, span in zip(names, pairwise(times), strict=True))


def _seconds(phases: Sequence[Phase]) -> dict[str, float]:
    """The duration of each phase, and of the iteration."""
    seconds = {f"perf/{phase.name}_time": phase.end_s - phase.start_s for phase in phases}
    return seconds | {"perf/step_time": phases[-1].end_s - phases[0].start_s}


def _per_second(number: float, seconds: float) -> float:
    return number / max(seconds, 1e-9)


def _averaged(reports: Sequence[StepReport]) -> dict[str, float]:
    """The mean of each metric over the steps that have it: in the first steps only a critic may learn."""
    values_by_name: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.metrics.items():
            values_by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in values_by_name.items()}


def _sampled_tokens(groups: Sequence[Group]) -> int:
    return sum(
        len(turn.tokens.completion.token_ids)
        for group in groups
        for episode in group.episodes
        for turn in episode.turns
        if turn.tokens is not None
    )
