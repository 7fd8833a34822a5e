"""One run, stage by stage: build the world, warm start, RL; evaluations in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.assembly.addresses import Addresses
from agentrl.assembly.algorithm import Algorithm, build_algorithm
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import RunData, bounded
from agentrl.assembly.env import EnvFactory, env_factory
from agentrl.assembly.model import model_source, threads_for
from agentrl.assembly.policy import EngineSetup, agent_factory, build_engine, build_renderer, dialect_of
from agentrl.assembly.processes import RunProcesses
from agentrl.assembly.trainer import TrainerFactory
from agentrl.data import DataSource, PromptStream
from agentrl.envs import BaseEnv, Scorer, tasks_of
from agentrl.envs.opponents import Opponent, check_opponents
from agentrl.observe import Journal, MetricLog
from agentrl.protocols import Engine, WeightSink
from agentrl.rollout.agent import SamplingSettings
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.producer import Producer
from agentrl.run.demonstrations import demonstrate
from agentrl.run.folder import RunFolder
from agentrl.run.held_out import GREEDY, SAMPLED, HeldOut, eval_metrics
from agentrl.run.journal_entries import iteration_entries, leftover_entries
from agentrl.run.lag import LagMeter
from agentrl.run.loop import Iteration, Loop
from agentrl.run.metrics import skipped_metrics
from agentrl.run.parts import Milestone, Progress, Records, World
from agentrl.run.stages import Stopwatch
from agentrl.run.warm_start import warm_start
from agentrl.types import Limits
from agentrl.view.console import RunConsole

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
    trainers: TrainerFactory
    held_out: HeldOut | None
    prompts: DataSource | None
    records: Records
    progress: Progress

    @classmethod
    async def build(
        cls,
        config: RunConfig,
        folder: RunFolder,
        console: RunConsole,
        addresses: Addresses,
        processes: RunProcesses,
    ) -> TrainingRun:
        """Build all parts. addresses: of the models that are served besides the policy.

        Raises:
            UserError: the environment, its arguments or the model directory are wrong, or an engine does not
                start.
        """
        watch = Stopwatch()
        with watch.stage(BUILD), console.stage(BUILD, 1):
            make_env = _env_factory(config, addresses)
            env = make_env()
            check_opponents(env, config.env.opponents)
            dialect = dialect_of(env, config.rendering)
            algorithm = build_algorithm(config.algorithm, max_length=_longest(env, config))
            data = RunData.of(config, env, console.line)
            source = model_source(
                config.model, env, dialect, seed=config.run.seed, folder=folder.model, corpus=data.corpus(env)
            )
            processes.trainers.prepare(source)
            setup = EngineSetup(
                folder.engine,
                console.line,
                # The dtype of published weights; with bf16, the dtype in the model's config.
                dtype=None if config.trainer.bf16 else "float32",
                process=processes.engine,
                threads=threads_for(source.config, config.run.num_threads),
            )
            engine = await build_engine(source, config.engine, env.limits, setup)
        world = World(make_env, Scorer(env.rewards), build_renderer(source, dialect, config.rendering))
        metrics = MetricLog(folder.path, use_tensorboard=config.run.use_tensorboard)
        return cls(
            config=config,
            world=world,
            engine=engine,
            sink=engine.sink,
            algorithm=algorithm,
            trainers=processes.trainers,
            held_out=_held_out(data, config, world, engine),
            prompts=data.source and bounded(data.source, config, env, world.renderer),
            records=Records(folder, console, metrics, Journal(folder.path), watch),
            progress=Progress(replace(source, seed=None)),
        )

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
        with watch.stage(WARM_START, steps), console.stage(WARM_START, steps) as bar:
            await warm_start(
                trainer,
                samples,
                steps=steps,
                batch_size=section.warm_start_batch_size,
                seed=seed,
                progress=lambda report: bar.advance(1, loss=report.metrics["train/loss"]),
            )
        await trainer.publish(self.sink, version=0)
        directory = records.folder.path / "checkpoint-warm-start"
        await trainer.save(str(directory))
        progress.source = replace(progress.source, directory=directory)

    async def reinforce(self) -> None:
        """The RL iterations; the producer is closed however they end."""
        config, progress = self.config, self.progress
        trainer = progress.trainer = await self.trainers.reinforcement(progress.source, self.algorithm.loss)
        assert self.prompts is not None, "a run with RL has prompts"
        stream = PromptStream(self.prompts)
        producer = self._producer(stream)
        loop = Loop(
            producer=producer,
            trainer=trainer,
            algorithm=self.algorithm,
            sink=self.sink,
            num_steps=config.rollout.num_steps_per_rollout,
            watch=CorrectionWatch(config.algorithm.correction),
        )
        try:
            async with LagMeter() as lag:
                await self._iterations(loop, lag, stream)
        finally:
            entries = [*leftover_entries(await producer.close(), loop.in_progress)]
            if entries:
                await self.records.journal.write_step(progress.step + 1, entries)

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
            progress.milestones.append(Milestone(name, progress.step, in_table, evaluations))
            for mode, evaluation in evaluations.items():
                # The name too: before and after a warm start are both step 0.
                await records.journal.write_eval(f"{mode} {name}", progress.step, evaluation.entries())
            progress.latest |= eval_metrics(evaluations)
        records.metrics.log(progress.step, progress.latest)

    async def _iterations(self, loop: Loop, lag: LagMeter, stream: PromptStream) -> None:
        number = self.config.rollout.num_rollout
        with self.records.console.stage(RL, number) as bar:
            for step in range(number):
                lag.take()
                with self.records.watch.stage(RL):
                    iteration = await loop.iterate(step)
                    iteration.metrics["perf/event_loop_lag_max"] = lag.take()
                    iteration.metrics.update(skipped_metrics(stream.take_skipped()))
                    await self._record(iteration)
                # The last evaluation is a row of the table; it follows the stage.
                if (step + 1) % self.config.eval.eval_interval == 0 and step + 1 < number:
                    await self.evaluate(f"iteration {step + 1}", in_table=False)
                bar.advance(1, **_progress_metrics(iteration, self.progress.latest))

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
        )
        return Producer(stream.next, player.play, batch_size=rollout.prompts)

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


def _longest(env: BaseEnv, config: RunConfig) -> int:
    """Most tokens of an episode, which constant weights divide by; where there is no limit, a default."""
    return env.limits.max_tokens or config.engine.max_context_len or Limits().max_tokens or 1
