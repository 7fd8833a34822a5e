"""One run, stage by stage: build the world, warm start, RL; evaluations in between."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.algorithms.laws import TokenLaws
from agentrl.assembly.addresses import Addresses
from agentrl.assembly.algorithm import Algorithm
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import RunData, bounded
from agentrl.assembly.env import run_env_factory
from agentrl.assembly.policy import build_renderer, dialect_of
from agentrl.assembly.processes import RunProcesses
from agentrl.assembly.rollout import Filters, build_producer
from agentrl.assembly.trainer import TrainerFactory
from agentrl.data import DataSource, PromptStream
from agentrl.envs.opponents import Opponent, check_opponents
from agentrl.errors import EngineError, TrainerError
from agentrl.records.history import record_sizes
from agentrl.rollout.cadence import Publishing, moving_reference
from agentrl.rollout.player import Player
from agentrl.rollout.players.players import Players
from agentrl.rollout.producer import Rollouts
from agentrl.run.checkpoints import RunState
from agentrl.run.colocation import Colocation
from agentrl.run.drift import drift_metrics
from agentrl.run.evaluations import Evaluations
from agentrl.run.held_out import HeldOut
from agentrl.run.journal_entries import iteration_entries, leftover_entries
from agentrl.run.lag import LagMeter
from agentrl.run.loop import Iteration, Loop, PlayLoop
from agentrl.run.metrics import mean_score, skipped_metrics
from agentrl.run.parts import (
    Progress,
    Records,
    World,
    algorithm_of,
    engines_of,
    facts_of,
    filters_of,
    player_of,
    scoring_of,
    source_of,
)
from agentrl.run.pretraining import CriticData, pretrain_critic
from agentrl.run.recording import StepRecorder, recorded
from agentrl.run.replay import Replay
from agentrl.run.starting import ranks_begun, unless_a_rank_ends
from agentrl.run.teaching import check_served
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

AnyLoop: TypeAlias = Loop | PlayLoop
Prompts: TypeAlias = PromptStream | Replay
"""The place in the prompts of a run, which its checkpoints keep."""


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

    @classmethod
    async def build(
        cls, config: RunConfig, records: Records, addresses: Addresses, processes: RunProcesses
    ) -> TrainingRun:
        """Build all parts. addresses: of the models that are served besides the policy.

        Raises:
            UserError: the environment, a function by path or the model is wrong, or an engine does not start.
        """
        console, origin, trainers = records.console, records.origin, processes.trainers
        with records.watch.stage(BUILD), console.stage(BUILD, 1) as bar, records.monitor.starting(bar):
            make_env = run_env_factory(config, addresses)
            check_opponents(env := make_env(), config.env.opponents)
            records.diagnoses.facts = facts_of(config, env)
            dialect = dialect_of(env, config.rendering)
            algorithm = algorithm_of(config, env)
            filters = filters_of(config.rollout)
            data = RunData.of(config, env, console.line)
            scorer, play = await scoring_of(config, make_env, data.first_task, addresses)
            source = source_of(config, env, dialect, data, records)
            replay = Replay.of(config, vocab_size=source.vocab_size, on_event=console.line)
            if origin is not None and (prompts := replay or data.source) is not None:
                prompts.check(origin.state.source)
            await check_served(algorithm, config, source)
            source = await ranks_begun(config, source, algorithm, trainers, is_resumed=origin is not None)
            starting = engines_of(config, source, env, records, processes, evaluates=bool(data.held_out))
            engines = await unless_a_rank_ends(trainers, starting)
        renderer = build_renderer(source, dialect, config.rendering)
        world = World(make_env, scorer, renderer, play_episode=play)
        progress, engine = Progress(replace(source, seed=None)), engines[0]
        held_out = HeldOut.of(data, config, world, engines[1] or engine)
        run = cls(
            config=config,
            world=world,
            engine=engine,
            sink=None if engine is None else engine.sink,
            algorithm=algorithm,
            filters=filters,
            trainers=trainers,
            evaluations=Evaluations(config, held_out, *engines, records, progress),
            prompts=data.source and bounded(data.source, config, env, world.renderer),
            records=records,
            progress=progress,
            replay=replay,
            critic_data=CriticData.of(config, source),
        )
        if origin is not None:
            run._restore(origin.state)
        return run

    @property
    def is_idle(self) -> bool:
        """Whether so many iterations in a row have trained on nothing, unsolved, that the run ends."""
        limit = self.config.rollout.idle_limit
        return self.algorithm is not None and 0 < limit <= self.progress.idle_rollouts

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
        progress = self.progress
        progress.trainer, progress.source = await warm_started(
            self.config, self.world, self.records, self.trainers, progress.source
        )
        if self.sink is not None:
            await progress.trainer.publish(self.sink, version=0)

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
        producer, prompts = self._rollouts(colocation)
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
        producer, prompts = self._rollouts(Colocation())
        await self._run(PlayLoop(producer), None, prompts)

    async def _run(self, loop: AnyLoop, recorder: StepRecorder | None, prompts: Prompts) -> None:
        """All iterations; the producer is closed however they end, and what was finished is kept."""
        self.progress.state = await self._state(loop, prompts)
        if self.records.origin is None and self.config.warm_starts:
            await self._save(loop.colocation)
        try:
            async with LagMeter() as lag:
                await self._iterations(loop, recorder, lag, prompts)
            if await self.evaluations.finish():
                self.progress.state = await self._state(loop, prompts)
        finally:
            await self.evaluations.drop()
            await self._stop(loop)

    async def _stop(self, loop: AnyLoop) -> None:
        """Keep what was finished: as a checkpoint, unless some of the next step was trained already.

        Groups that were played go on when the run resumes. Until then, the journal has them as dropped.
        """
        stopped, left = await loop.producer.stop(), await loop.producer.close()
        if entries := [*leftover_entries(left, loop.in_progress)]:
            await self.records.journal.write_step(self.progress.step + 1, entries)
        if loop.in_progress.trained:
            return
        with suppress(TrainerError, EngineError):  # one that has died is what stopped the run
            await self._save(loop.colocation)
            if self.records.groups is not None and self.progress.state is not None:
                ended = (*loop.in_progress.outcomes, *left)
                await self.records.checkpoints.save_groups(self.progress.step, ended, stopped)

    async def _save(self, colocation: Colocation) -> None:
        """Write a checkpoint of the last finished step, unless it has one."""
        progress = self.progress
        if progress.state is None or progress.saved_step == progress.state.step:
            return
        async with colocation.saving():
            await self.records.checkpoints.save(progress.trainer, progress.state, self.records.groups)
        progress.saved_step = progress.state.step

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
                shown = {short: iteration.metrics[name] for short, name in names.items()}
                bar.advance(1, **shown, **self.evaluations.shown)
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
        state = self.progress.state = await self._state(loop, prompts)
        self.records.forget(state)
        return iteration

    async def _between(self, loop: AnyLoop, prompts: Prompts) -> None:
        """What is due after a step but the last: an evaluation, and a checkpoint."""
        step, progress = self.progress.step, self.progress
        if await self.evaluations.after(step, has_new_weights=loop.in_progress.has_new_weights):
            progress.state = await self._state(loop, prompts)
        if step % self.config.checkpoint.save_interval == 0 or self.evaluations.may_be_best(step):
            await self._save(loop.colocation)

    def _rollouts(self, colocation: Colocation) -> tuple[Rollouts, Prompts]:
        """The batches from the next step on, and the place in their prompts."""
        origin = self.records.origin
        ordinal, version = (0, 0) if origin is None else (origin.state.next_ordinal, origin.state.version)
        if self.replay is not None:
            self.replay.resume(self.progress.step, version=version, next_ordinal=ordinal)
            return self.replay, self.replay
        assert self.prompts is not None, "a run with RL has prompts"
        stream = PromptStream(self.prompts, ordinal)
        if origin is not None:
            stream.resume(origin.state.pending, origin.state.skipped)
        assert self.engine is not None, "a run that plays has an engine"
        rollout, records, step = self.config.rollout, self.records, self.progress.step
        player = player_of(self.config, self.world, self.engine, self.filters, colocation.absence)
        player = replace(player, note=records.note)
        groups: Player = player if self.players is None else self.players.in_place_of(player)
        choose, num_batches = self.filters.choose, rollout.num_rollout - step
        producer = build_producer(rollout, stream.next, groups, choose, num_batches=num_batches)
        producer.resume(step, version=version, saved=records.resumed_groups())
        return producer, stream

    async def _state(self, loop: AnyLoop, prompts: Prompts) -> RunState:
        records, progress = self.records, self.progress
        await records.journal.flush()
        return RunState(
            attempt=records.attempt,
            step=progress.step,
            version=loop.version,
            source=prompts.fingerprint,
            next_ordinal=prompts.next_ordinal,
            pending=(*loop.producer.pending, *prompts.pending),
            skipped=dict(prompts.skipped),
            elapsed_s=records.metrics.elapsed_s,
            records=record_sizes(records.folder.path),
            milestones=tuple(milestone.saved() for milestone in progress.milestones),
            latest=progress.latest,
            scores=self.evaluations.scores,
            due_evaluations=self.evaluations.due,
            evaluating=self.evaluations.step,
            stages=records.watch.stages,
            # A run that is resumed after this end goes on for as long again.
            idle_rollouts=0 if self.is_idle else progress.idle_rollouts,
            controls={} if self.algorithm is None else self.algorithm.controls.state(),
        )

    def _restore(self, state: RunState) -> None:
        """Be as far as the checkpoint; its evaluations are read from the journal."""
        progress = self.progress
        progress.step = progress.saved_step = state.step
        progress.latest = dict(state.latest)
        progress.idle_rollouts = state.idle_rollouts
        if self.algorithm is not None:
            self.algorithm.controls.restore(state.controls)
        self.evaluations.restore(state)

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
