"""One run, stage by stage: build the world, warm start, RL; evaluations in between."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.algorithms.laws import TokenLaws
from agentrl.assembly.addresses import Addresses
from agentrl.assembly.algorithm import Algorithm
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import RunData, bounded
from agentrl.assembly.env import run_env_factory
from agentrl.assembly.policy import agent_factory, build_renderer, dialect_of
from agentrl.assembly.processes import RunProcesses
from agentrl.assembly.rollout import Filters, build_producer
from agentrl.assembly.trainer import TrainerFactory
from agentrl.data import DataSource, PromptStream
from agentrl.envs import tasks_of
from agentrl.envs.opponents import Opponent, check_opponents
from agentrl.errors import TrainerError
from agentrl.observe.history import record_sizes
from agentrl.protocols import Engine, WeightSink
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.producer import Producer, Rollouts
from agentrl.run.checkpoints import RunState
from agentrl.run.demonstrations import demonstrate
from agentrl.run.drift import drift_metrics
from agentrl.run.held_out import MODES, HeldOut, eval_metrics
from agentrl.run.imitation import imitate, shuffled_batches
from agentrl.run.journal_entries import iteration_entries, leftover_entries
from agentrl.run.lag import LagMeter
from agentrl.run.loop import Iteration, Loop, PlayLoop
from agentrl.run.metrics import skipped_metrics
from agentrl.run.parts import (
    Milestone,
    Progress,
    Records,
    World,
    algorithm_of,
    engine_of,
    filters_of,
    sampling_of,
    scoring_of,
    source_of,
)
from agentrl.run.recording import StepRecorder
from agentrl.run.replay import Replay
from agentrl.trainer.recording import Phase

BUILD, DEMONSTRATIONS, WARM_START = "building the world", "demonstrations", "warm start"
RL, EVALUATION, ROLLOUT = "RL", "evaluation", "rollout"
_UNTRAINED_EPISODES = 32

AnyLoop: TypeAlias = Loop | PlayLoop
Prompts: TypeAlias = PromptStream | Replay
"""The place in the prompts of a run, which its checkpoints keep."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The stages of a run, over parts that do not change; only `progress` does.

    engine: None = a replay, which plays nothing. sink: of new weights: the engine's own, unless it was
    replaced. algorithm: None = a run that only plays. held_out: None = there are no held-out tasks, and no
    evaluations. prompts: None = a run without RL. replay: the batches of a journal, None = they are played.
    """

    config: RunConfig
    world: World
    engine: Engine | None
    sink: WeightSink | None
    algorithm: Algorithm | None
    filters: Filters
    trainers: TrainerFactory
    held_out: HeldOut | None
    prompts: DataSource | None
    records: Records
    progress: Progress
    replay: Replay | None = None

    @classmethod
    async def build(
        cls, config: RunConfig, records: Records, addresses: Addresses, processes: RunProcesses
    ) -> TrainingRun:
        """Build all parts. addresses: of the models that are served besides the policy.

        Raises:
            UserError: the environment, its arguments, a function by path or the model directory are wrong, or
                an engine does not start.
        """
        console, origin = records.console, records.origin
        with records.watch.stage(BUILD), console.stage(BUILD, 1):
            make_env = run_env_factory(config, addresses)
            env = make_env()
            check_opponents(env, config.env.opponents)
            dialect = dialect_of(env, config.rendering)
            algorithm = algorithm_of(config, env)
            filters = filters_of(config.rollout)
            data = RunData.of(config, env, console.line)
            scorer, play = await scoring_of(config, make_env, data.first_task, addresses)
            source = source_of(config, env, dialect, data, records)
            replay = Replay.of(config, vocab_size=source.vocab_size, on_event=console.line)
            if origin is not None and (prompts := replay or data.source) is not None:
                prompts.check(origin.state.source)
            if not config.rollout.debug_rollout_only:
                processes.trainers.prepare(source)
            engine = await engine_of(config, source, env, records, processes)
        renderer = build_renderer(source, dialect, config.rendering)
        world = World(make_env, scorer, renderer, play_episode=play)
        run = cls(
            config=config,
            world=world,
            engine=engine,
            sink=None if engine is None else engine.sink,
            algorithm=algorithm,
            filters=filters,
            trainers=processes.trainers,
            held_out=HeldOut.of(data, config, world, engine),
            prompts=data.source and bounded(data.source, config, env, world.renderer),
            records=records,
            progress=Progress(replace(source, seed=None)),
            replay=replay,
        )
        if origin is not None:
            run._restore(origin.state)
        return run

    def against(self, opponents: Mapping[str, Opponent]) -> TrainingRun:
        """The same run, in which these play the agents that are not trained."""
        world = replace(self.world, opponents=opponents)
        held_out = self.held_out and replace(self.held_out, world=world)
        return replace(self, world=world, held_out=held_out)

    async def close(self) -> None:
        """Stop the engine, save the current weights, close the logs.

        Raises:
            UserError: the journal could not be written.
        """
        if self.engine is not None:
            await self.engine.close()
        await self.records.checkpoints.written()
        if self.progress.trainer is not None:
            await self.progress.trainer.save(str(self.records.folder.checkpoint))
        self.records.metrics.close()
        await self.records.journal.close()

    async def warm_start(self) -> None:
        """Imitate demonstrations, then publish the result and save it in a folder of its own."""
        section, seed = self.config.warm_start, self.config.run.seed
        world, records, progress = self.world, self.records, self.progress
        number, steps = section.demonstrations, section.warm_start_steps
        watch, console = records.watch, records.console
        with watch.stage(DEMONSTRATIONS, number), console.stage(DEMONSTRATIONS, number) as bar:
            tasks = tasks_of(world.make_env(), section.warm_start_split)
            samples = await demonstrate(
                world.make_env, world.renderer, tasks, number, seed=seed, progress=bar.advance
            )
        trainer = progress.trainer = await self.trainers.warm_start(progress.source)
        size = section.warm_start_batch_size
        order = shuffled_batches(len(samples), size, seed=seed, total=steps * size)
        batches = ([samples[index] for index in indices] for indices in order)
        with watch.stage(WARM_START, steps), console.stage(WARM_START, steps) as bar:
            async for report in imitate(trainer, batches):
                bar.advance(1, loss=report.metrics["train/loss"])
        if self.sink is not None:
            await trainer.publish(self.sink, version=0)
        directory = records.folder.warm_start
        await trainer.save(str(directory))
        progress.source = replace(progress.source, directory=directory)

    async def reinforce(self) -> None:
        """The RL iterations, with batches that are played, or those of a journal."""
        config, progress = self.config, self.progress
        assert self.algorithm is not None, "a run that trains has an algorithm"
        trainer = progress.trainer = await self.trainers.reinforcement(progress.source, self.algorithm.loss)
        origin = self.records.origin
        if origin is not None:
            await trainer.load_state(origin.trainer)
            # At 0 the engine has opened the very weights.
            if origin.state.version and self.sink is not None:
                await trainer.publish(self.sink, version=origin.state.version)
        producer, prompts = self._rollouts()
        loop = Loop(
            producer=producer,
            trainer=trainer,
            algorithm=self.algorithm,
            sink=self.sink,
            num_steps=config.rollout.num_steps_per_rollout,
            watch=CorrectionWatch(config.algorithm.correction),
            laws=TokenLaws(progress.source.vocab_size),
            removed=self.filters.removed,
        )
        folder, console = self.records.folder.path, self.records.console
        await self._run(loop, StepRecorder(config.observe, trainer, folder, console.line), prompts)

    async def record(self) -> None:
        """The iterations of a run that only plays: the policy stays as it is."""
        producer, prompts = self._rollouts()
        await self._run(PlayLoop(producer), None, prompts)

    async def _run(self, loop: AnyLoop, recorder: StepRecorder | None, prompts: Prompts) -> None:
        """All iterations; the producer is closed however they end, and what was finished is kept."""
        self.progress.state = await self._state(loop.producer, prompts)
        if self.records.origin is None and self.config.warm_starts:
            await self._save()
        try:
            async with LagMeter() as lag:
                await self._iterations(loop, recorder, lag, prompts)
        finally:
            await self._stop(loop)

    async def _stop(self, loop: AnyLoop) -> None:
        """Keep what was finished: as a checkpoint, unless some of the next step was trained already."""
        entries = [*leftover_entries(await loop.producer.close(), loop.in_progress)]
        if entries:
            await self.records.journal.write_step(self.progress.step + 1, entries)
        if not loop.in_progress.trained:
            # One that has died is what stopped the run.
            with suppress(TrainerError):
                await self._save()

    async def _save(self) -> None:
        """Write a checkpoint of the last finished step, unless it has one."""
        progress = self.progress
        if progress.state is None or progress.saved_step == progress.state.step:
            return
        await self.records.checkpoints.save(progress.trainer, progress.state)
        progress.saved_step = progress.state.step

    async def evaluate(self, name: str, *, in_table: bool = True) -> None:
        """Score the serving policy on held-out tasks, sampled and greedily; log and journal it."""
        records, progress = self.records, self.progress
        if self.held_out is None:
            return
        number = self.config.eval.eval_episodes
        if progress.trainer is None and self.config.model.hf_checkpoint is None:
            number = min(number, _UNTRAINED_EPISODES)
        with records.watch.stage(EVALUATION, self.held_out.num_episodes(number)):
            evaluations = await self.held_out.evaluations(number)
            files: dict[str, str] = {}
            for key, evaluation in evaluations.items():
                # The name too: before and after a warm start are both step 0.
                path = await records.journal.write_eval(f"{key} {name}", progress.step, evaluation.entries())
                files[key] = str(path.relative_to(records.folder.path))
            progress.milestones.append(Milestone(name, progress.step, in_table, evaluations, files))
            progress.latest |= eval_metrics(evaluations)
        records.metrics.log(progress.step, progress.latest)

    async def _iterations(
        self, loop: AnyLoop, recorder: StepRecorder | None, lag: LagMeter, prompts: Prompts
    ) -> None:
        number, first = self.config.rollout.num_rollout, self.progress.step
        if self.replay is not None:
            number = min(number, self.replay.num_steps)
        title = ROLLOUT if self.config.rollout.debug_rollout_only else RL
        with self.records.console.stage(title, number) as bar:
            bar.advance(first)
            if first:
                await self._between(loop, prompts)
            for step in range(first, number):
                lag.take()
                with self.records.watch.stage(title):
                    async with _recorded(recorder, step + 1) as phases:
                        iteration = await loop.iterate(step)
                        phases.extend(iteration.phases)
                    iteration.metrics["perf/event_loop_lag_max"] = lag.take()
                    iteration.metrics.update(skipped_metrics(prompts.take_skipped()))
                    seed = f"drift/{self.config.run.seed}/{step}"
                    drift = drift_metrics(iteration.outcomes, self.progress.source, seed=seed)
                    iteration.metrics.update(drift)
                    # Until the journal has this step, no checkpoint may say that it has.
                    self.progress.state = None
                    await self._record(iteration)
                self.progress.state = await self._state(loop.producer, prompts)
                if step + 1 < number:
                    await self._between(loop, prompts)
                bar.advance(1, **_progress_metrics(iteration, self.progress.latest))

    async def _between(self, loop: AnyLoop, prompts: Prompts) -> None:
        """What is due after a step: an evaluation, unless the run has it already, and a checkpoint."""
        step, progress = self.progress.step, self.progress
        name = f"iteration {step}"
        # The last one belongs to the table and is made when the stage has ended.
        is_new = all(milestone.name != name for milestone in progress.milestones)
        if step % self.config.eval.eval_interval == 0 and is_new:
            await self.evaluate(name, in_table=False)
            progress.state = await self._state(loop.producer, prompts)
        if step % self.config.checkpoint.save_interval == 0:
            await self._save()

    def _rollouts(self) -> tuple[Rollouts, Prompts]:
        """The batches from the next step on, and the place in their prompts."""
        origin = self.records.origin
        ordinal, version = (0, 0) if origin is None else (origin.state.next_ordinal, origin.state.version)
        if self.replay is not None:
            self.replay.resume(self.progress.step, version=version, next_ordinal=ordinal)
            return self.replay, self.replay
        assert self.prompts is not None, "a run with RL has prompts"
        stream = PromptStream(self.prompts, ordinal)
        producer = self._producer(stream)
        producer.resume(self.progress.step, version=version)
        return producer, stream

    def _producer(self, stream: PromptStream) -> Producer:
        rollout, seed, world = self.config.rollout, self.config.run.seed, self.world
        assert self.engine is not None, "a run that plays has an engine"
        sampling = sampling_of(rollout, rollout.rollout_temperature)
        player = GroupPlayer(
            make_env=world.make_env,
            make_agent=agent_factory(self.engine, world.renderer, sampling),
            scorer=world.scorer,
            size=rollout.n_samples_per_prompt,
            retries=rollout.max_episode_retries,
            seed=seed,
            shuffle_rewards=rollout.shuffle_rewards,
            opponents=world.opponents,
            drops=self.filters.drops,
            play_episode=world.play_episode,
        )
        return build_producer(rollout, stream.next, player, self.filters.choose)

    async def _state(self, producer: Rollouts, prompts: Prompts) -> RunState:
        records, progress = self.records, self.progress
        await records.journal.flush()
        return RunState(
            attempt=records.attempt,
            step=progress.step,
            version=producer.version,
            source=prompts.fingerprint,
            next_ordinal=prompts.next_ordinal,
            elapsed_s=records.metrics.elapsed_s,
            records=record_sizes(records.folder.path),
            milestones=tuple(milestone.saved() for milestone in progress.milestones),
            latest=progress.latest,
            stages=records.watch.stages,
        )

    def _restore(self, state: RunState) -> None:
        """Be as far as the checkpoint; its evaluations are read from the journal."""
        progress, folder = self.progress, self.records.folder.path
        progress.step = progress.saved_step = state.step
        progress.latest = dict(state.latest)
        if self.held_out is None:
            return
        for saved in state.milestones:
            journal = {mode: folder / name for mode, name in saved.files.items()}
            evaluations = self.held_out.restored(journal, saved.seconds)
            milestone = Milestone(saved.name, saved.step, saved.in_table, evaluations, saved.files)
            progress.milestones.append(milestone)

    async def _record(self, iteration: Iteration) -> None:
        records, step = self.records, iteration.step + 1
        self.progress.step = step
        for warning in iteration.warnings:
            records.console.line(f"Warning: {warning}")
        await records.journal.write_step(step, iteration_entries(iteration))
        events = {} if self.engine is None else self.engine.counts
        counts = {f"engine/{name}": float(count) for name, count in events.items()}
        records.metrics.log(step, iteration.metrics | counts)


def _recorded(recorder: StepRecorder | None, step: int) -> AbstractAsyncContextManager[list[Phase]]:
    """The block of a step, for its phases; without a trainer nothing is recorded."""
    return nullcontext(list[Phase]()) if recorder is None else recorder.step(step)


def _progress_metrics(iteration: Iteration, latest: dict[str, float]) -> dict[str, float]:
    """The metrics in the progress bar. latest: those of the last evaluation."""
    metrics = {
        "reward": iteration.metrics["rollout/raw_reward"],
        "tok/s": iteration.metrics["perf/rollout_tok_per_s"],
    }
    means = {name.removeprefix("eval/"): value for name, value in latest.items() if name.endswith(MODES)}
    return metrics | means
