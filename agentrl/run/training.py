"""One run, stage by stage: build the world, warm start, RL; evaluations in between."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.algorithms.laws import TokenLaws
from agentrl.assembly.addresses import Addresses
from agentrl.assembly.algorithm import Algorithm, build_algorithm
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import RunData, bounded
from agentrl.assembly.env import EnvFactory, env_factory
from agentrl.assembly.model import model_source, threads_for
from agentrl.assembly.policy import EngineSetup, agent_factory, build_engine, build_renderer, dialect_of
from agentrl.assembly.processes import RunProcesses
from agentrl.assembly.rewards import build_scorer
from agentrl.assembly.rollout import Filters, build_filters, build_play, build_producer
from agentrl.assembly.trainer import TrainerFactory
from agentrl.checkpoints.source import ModelSource, open_source
from agentrl.data import DataSource, PromptStream
from agentrl.envs import AnyEnv, BaseEnv, tasks_of
from agentrl.envs.dialect import Dialect
from agentrl.envs.opponents import Opponent, check_opponents
from agentrl.errors import TrainerError
from agentrl.observe.history import record_sizes
from agentrl.protocols import Engine, WeightSink
from agentrl.rollout.agent import SamplingSettings
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.producer import Producer
from agentrl.run.checkpoints import RunState
from agentrl.run.demonstrations import demonstrate
from agentrl.run.drift import drift_metrics
from agentrl.run.held_out import GREEDY, SAMPLED, HeldOut, eval_metrics
from agentrl.run.imitation import imitate, shuffled_batches
from agentrl.run.journal_entries import iteration_entries, leftover_entries
from agentrl.run.lag import LagMeter
from agentrl.run.loop import Iteration, Loop
from agentrl.run.metrics import skipped_metrics
from agentrl.run.parts import Milestone, Progress, Records, World
from agentrl.run.recording import StepRecorder
from agentrl.types import Limits

BUILD, DEMONSTRATIONS, WARM_START = "building the world", "demonstrations", "warm start"
RL, EVALUATION = "RL", "evaluation"
_UNTRAINED_EPISODES = 32


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """The stages of a run, over parts that do not change; only `progress` does.

    sink: of new weights: the engine's own, unless it was replaced.
    held_out: None = there are no held-out tasks, and no evaluations. prompts: None = a run without RL.
    """

    config: RunConfig
    world: World
    engine: Engine
    sink: WeightSink
    algorithm: Algorithm
    filters: Filters
    trainers: TrainerFactory
    held_out: HeldOut | None
    prompts: DataSource | None
    records: Records
    progress: Progress

    @classmethod
    async def build(
        cls, config: RunConfig, records: Records, addresses: Addresses, processes: RunProcesses
    ) -> TrainingRun:
        """Build all parts. addresses: of the models that are served besides the policy.

        Raises:
            UserError: the environment, its arguments, a function by path or the model directory are wrong, or
            an
                engine does not start.
        """
        console, origin = records.console, records.origin
        with records.watch.stage(BUILD), console.stage(BUILD, 1):
            make_env = _env_factory(config, addresses)
            env = make_env()
            check_opponents(env, config.env.opponents)
            dialect = dialect_of(env, config.rendering)
            algorithm = build_algorithm(config.algorithm, max_length=_longest(env, config))
            filters = build_filters(config.rollout)
            data = RunData.of(config, env, console.line)
            if origin is not None and data.source is not None:
                data.source.check(origin.state.source)
            scorer = await build_scorer(config.env, make_env, data.first_task)
            play = await build_play(config.env.custom_generate_function_path, make_env, data.first_task)
            source = _source(config, env, dialect, data, records)
            processes.trainers.prepare(source)
            engine = await _engine(config, source, env, records, processes)
        renderer = build_renderer(source, dialect, config.rendering)
        world = World(make_env, scorer, renderer, play_episode=play)
        run = cls(
            config=config,
            world=world,
            engine=engine,
            sink=engine.sink,
            algorithm=algorithm,
            filters=filters,
            trainers=processes.trainers,
            held_out=_held_out(data, config, world, engine),
            prompts=data.source and bounded(data.source, config, env, world.renderer),
            records=records,
            progress=Progress(replace(source, seed=None)),
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
        await trainer.publish(self.sink, version=0)
        directory = records.folder.warm_start
        await trainer.save(str(directory))
        progress.source = replace(progress.source, directory=directory)

    async def reinforce(self) -> None:
        """The RL iterations; the producer is closed however they end, and what was finished is kept."""
        config, progress = self.config, self.progress
        trainer = progress.trainer = await self.trainers.reinforcement(progress.source, self.algorithm.loss)
        origin = self.records.origin
        if origin is not None:
            await trainer.load_state(origin.trainer)
            # At 0 the engine has opened the very weights.
            if origin.state.version:
                await trainer.publish(self.sink, version=origin.state.version)
        assert self.prompts is not None, "a run with RL has prompts"
        stream = PromptStream(self.prompts, 0 if origin is None else origin.state.next_ordinal)
        producer = self._producer(stream)
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
        progress.state = await self._state(producer, stream)
        if origin is None and config.warm_start.warm_start_steps:
            await self._save()
        recorder = StepRecorder(config.observe, trainer, self.records.folder.path, self.records.console.line)
        try:
            async with LagMeter() as lag:
                await self._iterations(loop, recorder, lag, stream)
        finally:
            await self._stop(loop)

    async def _stop(self, loop: Loop) -> None:
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
        if progress.trainer is None or progress.state is None or progress.saved_step == progress.state.step:
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
        with records.watch.stage(EVALUATION, 2 * number):
            evaluations = await self.held_out.evaluations(number)
            files: dict[str, str] = {}
            for mode, evaluation in evaluations.items():
                # The name too: before and after a warm start are both step 0.
                path = await records.journal.write_eval(f"{mode} {name}", progress.step, evaluation.entries())
                files[mode] = str(path.relative_to(records.folder.path))
            progress.milestones.append(Milestone(name, progress.step, in_table, evaluations, files))
            progress.latest |= eval_metrics(evaluations)
        records.metrics.log(progress.step, progress.latest)

    async def _iterations(
        self, loop: Loop, recorder: StepRecorder, lag: LagMeter, stream: PromptStream
    ) -> None:
        number, first = self.config.rollout.num_rollout, self.progress.step
        with self.records.console.stage(RL, number) as bar:
            bar.advance(first)
            if first:
                await self._between(loop, stream)
            for step in range(first, number):
                lag.take()
                with self.records.watch.stage(RL):
                    async with recorder.step(step + 1) as phases:
                        iteration = await loop.iterate(step)
                        phases.extend(iteration.phases)
                    iteration.metrics["perf/event_loop_lag_max"] = lag.take()
                    iteration.metrics.update(skipped_metrics(stream.take_skipped()))
                    seed = f"drift/{self.config.run.seed}/{step}"
                    drift = drift_metrics(iteration.outcomes, self.progress.source, seed=seed)
                    iteration.metrics.update(drift)
                    # Until the journal has this step, no checkpoint may say that it has.
                    self.progress.state = None
                    await self._record(iteration)
                self.progress.state = await self._state(loop.producer, stream)
                if step + 1 < number:
                    await self._between(loop, stream)
                bar.advance(1, **_progress_metrics(iteration, self.progress.latest))

    async def _between(self, loop: Loop, stream: PromptStream) -> None:
        """What is due after a step: an evaluation, unless the run has it already, and a checkpoint."""
        step, progress = self.progress.step, self.progress
        name = f"iteration {step}"
        # The last one belongs to the table and is made when the stage has ended.
        is_new = all(milestone.name != name for milestone in progress.milestones)
        if step % self.config.eval.eval_interval == 0 and is_new:
            await self.evaluate(name, in_table=False)
            progress.state = await self._state(loop.producer, stream)
        if step % self.config.checkpoint.save_interval == 0:
            await self._save()

    def _producer(self, stream: PromptStream) -> Producer:
        rollout, seed, world = self.config.rollout, self.config.run.seed, self.world
        sampling = _sampling(rollout, rollout.rollout_temperature)
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
        producer = build_producer(rollout, stream.next, player, self.filters.choose)
        if self.records.origin is not None:
            producer.resume(self.progress.step, version=self.records.origin.state.version)
        return producer

    async def _state(self, producer: Producer, stream: PromptStream) -> RunState:
        records, progress = self.records, self.progress
        await records.journal.flush()
        return RunState(
            attempt=records.attempt,
            step=progress.step,
            version=producer.version,
            source=stream.source.fingerprint,
            next_ordinal=stream.next_ordinal,
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
        counts = {f"engine/{name}": float(count) for name, count in self.engine.counts.items()}
        records.metrics.log(step, iteration.metrics | counts)


def _sampling(rollout: RolloutConfig, temperature: float) -> SamplingSettings:
    return SamplingSettings(
        temperature=temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_response_len=rollout.rollout_max_response_len,
    )


def _progress_metrics(iteration: Iteration, latest: dict[str, float]) -> dict[str, float]:
    """The metrics in the progress bar. latest: those of the last evaluation."""
    metrics = {
        "reward": iteration.metrics["rollout/raw_reward"],
        "tok/s": iteration.metrics["perf/rollout_tok_per_s"],
    }
    return metrics | {mode: latest[f"eval/{mode}"] for mode in (SAMPLED, GREEDY) if f"eval/{mode}" in latest}


def _held_out(data: RunData, config: RunConfig, world: World, engine: Engine) -> HeldOut | None:
    if data.held_out is None:
        return None
    sampling = _sampling(config.rollout, config.eval.eval_temperature)
    return HeldOut(world, engine, data.held_out, config.eval.eval_split, sampling, config.run.seed)


def _env_factory(config: RunConfig, addresses: Addresses) -> EnvFactory:
    rollout = config.rollout
    return env_factory(
        config.env.env,
        config.env.env_kwargs,
        limits=config.env.chosen(max_turns=rollout.max_turns, max_tokens=rollout.rollout_max_context_len),
        tools=config.env,
        addresses=addresses,
        reward=config.env.reward,
    )


def _source(config: RunConfig, env: AnyEnv, dialect: Dialect, data: RunData, records: Records) -> ModelSource:
    """The model that RL begins with; of a resumed run, the one that it began with."""
    folder, directory = records.folder, config.model.hf_checkpoint
    if records.origin is not None and config.warm_start.warm_start_steps:
        return open_source(folder.warm_start)
    if records.origin is not None:
        return open_source(directory or folder.model)
    return model_source(
        config.model, env, dialect, seed=config.run.seed, folder=folder.model, corpus=data.corpus(env)
    )


async def _engine(
    config: RunConfig, source: ModelSource, env: BaseEnv, records: Records, processes: RunProcesses
) -> Engine:
    setup = EngineSetup(
        records.folder.engine,
        records.console.line,
        # The dtype of published weights; with bf16, the dtype in the model's config.
        dtype=None if config.trainer.bf16 else "float32",
        process=processes.engine,
        threads=threads_for(source.config, config.run.num_threads),
    )
    return await build_engine(source, config.engine, env.limits, setup)


def _longest(env: BaseEnv, config: RunConfig) -> int:
    """Most tokens of an episode, which constant weights divide by; where there is no limit, a default."""
    return env.limits.max_tokens or config.engine.max_context_len or Limits().max_tokens or 1
