"""One run, stage by stage: build the world, warm start, RL; evaluations in between."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.algorithms.laws import TokenLaws
from agentrl.assembly.algorithm import Algorithm
from agentrl.assembly.config import RunConfig
from agentrl.assembly.rollout import Filters, build_producer
from agentrl.assembly.trainer import TrainerFactory
from agentrl.data import DataSource, PromptStream
from agentrl.envs.opponents import Opponent
from agentrl.rollout.cadence import Publishing, moving_reference
from agentrl.rollout.player import Player
from agentrl.rollout.players.players import Players
from agentrl.rollout.producer import Rollouts
from agentrl.run.colocation import Colocation
from agentrl.run.drift import drift_metrics
from agentrl.run.evaluations import Evaluations, shown
from agentrl.run.journal_entries import iteration_entries
from agentrl.run.loop import Iteration, Loop, PlayLoop
from agentrl.run.metrics import mean_score, skipped_metrics
from agentrl.run.parts import (
    Progress,
    Records,
    World,
    player_of,
)
from agentrl.run.pretraining import CriticData, pretrain_critic
from agentrl.run.recording import StepRecorder, recorded
from agentrl.run.replay import Replay
from agentrl.run.stages import LagMeter
from agentrl.run.states import AnyLoop, Prompts, RunStates
from agentrl.run.warm_start import warm_started
from agentrl.runtime.event_loop import to_its_end
from agentrl.types.seams import Engine, Trainer, WeightSink


# The models of a run that ends: the last one, and the one that scored best, where the last one is worse.
async def save_models(
    trainer: Trainer, records: Records, scores: Mapping[int, float], config: RunConfig
) -> None:
    """Write the models. The trainer has the weights of the best one then.

    scores: `best_metric` of evaluated weights, by their iteration. Of weights that were better and have no
    checkpoint any more, nothing is written.

    Raises:
        TrainerError: a process of the trainer failed.
        OSError: a model could not be written.
    """
    folder = records.folder
    await trainer.save(str(folder.checkpoint))
    shutil.rmtree(folder.best, ignore_errors=True)
    if not scores or max(scores.values()) <= (last := scores[max(scores)]):
        return
    # It reads every byte of the checkpoint.
    checkpoint = await asyncio.to_thread(records.checkpoints.best_of, scores)
    if checkpoint is None or checkpoint.state.step >= max(scores):
        return
    if config.trainer.offloads_train:
        await trainer.onload()
    await trainer.load_state(checkpoint.trainer)
    await trainer.save(str(folder.best))
    records.console.line(
        f"Best:   {folder.best} (step {checkpoint.state.step}: {config.best_metric} "
        f"{max(scores.values()):.3f}; the last weights: {last:.3f})"
    )


_FINISHING = "Stopping after the step that is being trained; interrupt again to stop at once."
BUILD, TRAINER, RL, ROLLOUT = "building the world", "starting the trainer", "RL", "rollout"


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The stages of a run, over parts that do not change; only `progress` does.

    engine: None = a replay, which plays nothing. sink: of new weights: the engine's own, unless it was
    replaced. algorithm: None = a run that only plays. prompts: None = a run without RL. replay: the batches
    of a journal, None = they are played. players: None = this process plays.
    """

    config: RunConfig
    world: World
    engine: Engine | None
    sink: WeightSink | None
    algorithm: Algorithm | None
    filters: Filters
    trainers: TrainerFactory
    evaluations: Evaluations
    prompts: DataSource | None
    records: Records
    progress: Progress
    replay: Replay | None = None
    critic_data: CriticData | None = None
    players: Players | None = None

    @property
    def is_idle(self) -> bool:
        """Whether so many iterations in a row have trained on nothing, unsolved, that the run ends."""
        return self.states.is_idle

    @property
    def states(self) -> RunStates:
        """What its checkpoints have."""
        idle_limit = self.config.rollout.idle_limit
        return RunStates(self.records, self.progress, self.evaluations, self.algorithm, idle_limit)

    def against(self, opponents: Mapping[str, Opponent]) -> TrainingRun:
        """The same run, in which these play the agents that are not trained."""
        world = replace(self.world, opponents=opponents)
        return replace(self, world=world, evaluations=self.evaluations.against(world))

    async def close(self) -> None:
        """Stop the engine, save the current weights, close the logs.

        Raises:
            DiskError: the journal could not be written.
            OSError: the weights could not be written.
        """
        async with AsyncExitStack() as ending:
            # The last is called first, and what one raises keeps no other from its call.
            ending.push_async_callback(self.records.journal.close)
            ending.callback(self.records.metrics.close)
            if self.progress.trainer is not None:
                parts = self.records, self.evaluations.scores, self.config
                ending.push_async_callback(save_models, self.progress.trainer, *parts)
            ending.push_async_callback(self.records.checkpoints.written)
            if self.engine is not None:
                ending.push_async_callback(self.engine.close)
            ending.push_async_callback(self.evaluations.close)

    async def warm_start(self) -> None:
        """Imitate demonstrations, save the result in a folder of its own, and publish it."""
        trainer = await warm_started(self.config, self.world, self.records, self.trainers, self.progress)
        if self.sink is not None:
            await trainer.publish(self.sink, version=0)

    async def reinforce(self) -> None:
        """The RL iterations, with batches that are played, or those of a journal."""
        config, progress, origin = self.config, self.progress, self.records.origin
        assert self.algorithm is not None, "a run that trains has an algorithm"
        colocation = Colocation.of(config.trainer, self.engine, self.sink)
        async with colocation.starting(0 if origin is None else origin.state.version):
            with self.records.console.stage(TRAINER, 1) as bar, self.records.monitor.starting(bar):
                trainer = await self.trainers.reinforcement(progress.source, self.algorithm.loss)
            progress.trainer = colocation.trainer = trainer
            if (kernels := await trainer.kernels()) is not None:
                self.records.console.line(kernels)
            if origin is not None:
                await trainer.load_state(origin.trainer)
        if origin is None and self.critic_data is not None:
            await pretrain_critic(self.critic_data, trainer, self.algorithm, self.records)
        producer, prompts = _rollouts(self, colocation)
        loop = Loop(
            producer=producer,
            trainer=trainer,
            algorithm=self.algorithm,
            sink=self.sink,
            num_steps=config.rollout.num_steps_per_rollout,
            num_epochs=config.algorithm.ppo_epochs,
            watch=CorrectionWatch(config.algorithm.watched_correction),
            laws=TokenLaws(progress.source.vocab_size),
            removed=self.filters.removed,
            publishing=Publishing.of(config.rollout),
            overlaps=config.rollout.is_async,
            colocation=colocation,
            moving=moving_reference(config.algorithm),
        )
        recorder = StepRecorder(config.observe, trainer, self.records.folder.path, self.records.console.line)
        await self._run(loop, recorder, prompts)

    async def record(self) -> None:
        """The iterations of a run that only plays: the policy stays as it is."""
        producer, prompts = _rollouts(self, Colocation())
        await self._run(PlayLoop(producer), None, prompts)

    async def _run(self, loop: AnyLoop, recorder: StepRecorder | None, prompts: Prompts) -> None:
        """All iterations; the producer is closed however they end, and what was finished is kept."""
        await self.states.take(loop, prompts)
        if self.records.origin is None and self.config.warm_starts:
            await self.states.save(loop.colocation)
        try:
            async with LagMeter() as lag:
                await self._iterations(loop, recorder, lag, prompts)
            if await self.evaluations.finish():
                await self.states.take(loop, prompts)
        finally:
            await self.evaluations.drop()
            await self.states.stop(loop)

    async def _iterations(
        self, loop: AnyLoop, recorder: StepRecorder | None, lag: LagMeter, prompts: Prompts
    ) -> None:
        number, first = self.config.rollout.num_rollout, self.progress.step
        if self.replay is not None:
            number = min(number, self.replay.num_steps)
        title, monitor = ROLLOUT if self.config.rollout.debug_rollout_only else RL, self.records.monitor
        with self.records.console.stage(title, number) as bar, monitor.iterations(loop, bar):
            bar.advance(first)
            if first:
                await self._between(loop, prompts)
            for step in range(first, number):
                if self.records.are_enough:
                    break
                iteration, is_cancelled = await to_its_end(
                    self._iteration(loop, recorder, lag, prompts),
                    # The weights have changed, or the journal has some of the step.
                    lambda: loop.in_progress.is_training or self.progress.state is None,
                    partial(self.records.console.line, _FINISHING),
                )
                if is_cancelled:
                    raise asyncio.CancelledError
                is_last = step + 1 == number or self.is_idle or self.records.are_enough
                if not is_last:
                    await self._between(loop, prompts)
                names = {"reward": "rollout/raw_reward", "tok/s": "perf/rollout_tok_per_s"}
                figures = {short: iteration.metrics[name] for short, name in names.items()}
                bar.advance(1, **figures, **shown(self.progress))
                if is_last:
                    break

    async def _iteration(
        self, loop: AnyLoop, recorder: StepRecorder | None, lag: LagMeter, prompts: Prompts
    ) -> Iteration:
        """The next iteration; it ends when the journal has it."""
        step, monitor = self.progress.step, self.records.monitor
        lag.take()
        monitor.begin()
        with self.records.watch.stage(ROLLOUT if isinstance(loop, PlayLoop) else RL):
            async with recorded(recorder, step + 1) as phases:
                iteration = await loop.iterate(step)
                phases.extend(iteration.phases)
            iteration.metrics["perf/event_loop_lag_max"] = lag.take()
            iteration.metrics.update(skipped_metrics(prompts.take_skipped()))
            iteration.metrics.update(monitor.end((*iteration.trained, *iteration.dropped)))
            seed = f"drift/{self.config.run.seed}/{step}"
            iteration.metrics.update(drift_metrics(iteration.outcomes, self.progress.source, seed=seed))
            self.progress.state = None  # until the journal has this step, no checkpoint may say that it has
            await self._record(iteration)
        self.records.forget(await self.states.take(loop, prompts))
        return iteration

    async def _between(self, loop: AnyLoop, prompts: Prompts) -> None:
        """What is due after a step but the last: an evaluation, and a checkpoint."""
        step = self.progress.step
        if await self.evaluations.after(step, has_new_weights=loop.in_progress.has_new_weights):
            await self.states.take(loop, prompts)
        if step % self.config.checkpoint.save_interval == 0 or self.evaluations.may_be_best(step):
            await self.states.save(loop.colocation)

    async def _record(self, iteration: Iteration) -> None:
        records, step = self.records, iteration.step + 1
        self.progress.step = step
        is_solved = records.diagnoses.facts.is_solved(mean_score(iteration.outcomes))
        self.progress.idle_rollouts = 0 if iteration.trained or is_solved else self.progress.idle_rollouts + 1
        for warning in iteration.warnings:
            records.console.line(f"Warning: {warning}")
        await records.journal.write_step(step, iteration_entries(iteration))
        events = {} if self.engine is None else self.engine.counts
        counts = {f"engine/{name}": float(count) for name, count in events.items()}
        records.log(step, iteration.metrics | counts)


def _rollouts(run: TrainingRun, colocation: Colocation) -> tuple[Rollouts, Prompts]:
    """The batches from the next step on, and the place in their prompts."""
    origin = run.records.origin
    ordinal, version = (0, 0) if origin is None else (origin.state.next_ordinal, origin.state.version)
    if run.replay is not None:
        run.replay.resume(run.progress.step, version=version, next_ordinal=ordinal)
        return run.replay, run.replay
    assert run.prompts is not None, "a run with RL has prompts"
    stream = PromptStream(run.prompts, ordinal)
    if origin is not None:
        stream.resume(origin.state.pending, origin.state.skipped)
    assert run.engine is not None, "a run that plays has an engine"
    rollout, records, step = run.config.rollout, run.records, run.progress.step
    player = player_of(run.config, run.world, run.engine, run.filters, colocation.absence)
    player = replace(player, note=records.note)
    groups: Player = player if run.players is None else run.players.in_place_of(player)
    choose, num_batches = run.filters.choose, rollout.num_rollout - step
    producer = build_producer(rollout, stream.next, groups, choose, num_batches=num_batches)
    producer.resume(version=version, saved=records.resumed_groups())
    return producer, stream
