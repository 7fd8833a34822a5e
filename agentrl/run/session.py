"""One run, stage by stage: build the world, warm start, RL; evaluate in between; leave a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentrl.algorithms.corrections import CorrectionWatch
from agentrl.build.addresses import Addresses
from agentrl.build.algorithm import Algorithm, build_algorithm
from agentrl.build.config import RunConfig
from agentrl.build.env import EnvFactory, env_factory
from agentrl.build.model import model_source, threads_for
from agentrl.build.policy import Place, agent_factory, build_engine, build_renderer, dialect_of
from agentrl.build.processes import RunProcesses
from agentrl.build.trainer import TrainerFactory
from agentrl.checkpoints.source import ModelSource
from agentrl.envs import BaseEnv, Scorer, tasks_of
from agentrl.envs.opponents import Opponent, check_opponents
from agentrl.evaluation.episodes import Evaluation, Evaluator
from agentrl.evaluation.report import EvalSetting
from agentrl.observe import Journal, MetricLog
from agentrl.protocols import Engine, Renderer, Trainer, WeightSink
from agentrl.rollout.agent import SamplingSettings
from agentrl.rollout.data import TaskStream
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.producer import Producer
from agentrl.run.books import iteration_entries, leftover_entries
from agentrl.run.demonstrations import demonstrate
from agentrl.run.folder import RunFolder
from agentrl.run.lag import LagMeter
from agentrl.run.loop import Iteration, Loop
from agentrl.run.stages import Stopwatch
from agentrl.run.warm_start import warm_start
from agentrl.types import Limits
from agentrl.view.console import RunConsole

BUILD, DEMONSTRATIONS, WARM_START = "building the world", "demonstrations", "warm start"
RL, EVALUATION = "RL", "evaluation"
GREEDY, SAMPLED = "greedy", "sampled"
_UNTRAINED_EPISODES = 32


@dataclass(frozen=True, slots=True)
class Milestone:
    """The policy at one point of the run, scored on held-out tasks, by mode (sampled, greedy).

    in_table: one of the stages that people compare, rather than a point in the middle of RL.
    """

    name: str
    step: int
    in_table: bool
    evaluations: Mapping[str, Evaluation]


@dataclass(slots=True)
class Session:
    """The state of a run: its parts, built once, and what it has seen so far.

    sink: where new weights go: the engine's own, unless someone put another before it.
    opponents: who plays the agents that are not trained.
    """

    config: RunConfig
    folder: RunFolder
    console: RunConsole
    make_env: EnvFactory
    source: ModelSource
    renderer: Renderer
    engine: Engine
    sink: WeightSink
    metrics: MetricLog
    journal: Journal
    watch: Stopwatch
    scorer: Scorer
    algorithm: Algorithm
    trainers: TrainerFactory
    milestones: list[Milestone] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)
    trainer: Trainer | None = None
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    step: int = 0

    @classmethod
    async def build(
        cls,
        config: RunConfig,
        folder: RunFolder,
        console: RunConsole,
        addresses: Addresses,
        processes: RunProcesses,
    ) -> Session:
        """Everything that the stages share. addresses: of the models that are served beside the policy.

        Raises:
            UserError: the environment, its arguments or the model directory are wrong, or an engine does not
                come up.
        """
        watch = Stopwatch()
        with watch.stage(BUILD), console.stage(BUILD, 1):
            make_env = _env_factory(config, addresses)
            env = make_env()
            check_opponents(env, config.env.opponents)
            dialect = dialect_of(env, config.rendering)
            algorithm = build_algorithm(config.algorithm, max_length=_longest(env, config))
            source = model_source(config.model, env, dialect, seed=config.run.seed, folder=folder.model)
            processes.trainers.prepare(source)
            place = Place(
                folder.engine,
                console.line,
                # What is published; with bf16, what the model's config says.
                dtype=None if config.trainer.bf16 else "float32",
                process=processes.engine,
                threads=threads_for(source.config, config.run.num_threads),
            )
            engine = await build_engine(source, config.engine, env.limits, place)
        return cls(
            config=config,
            folder=folder,
            console=console,
            make_env=make_env,
            source=replace(source, seed=None),
            renderer=build_renderer(source, dialect, config.rendering),
            engine=engine,
            sink=engine.sink,
            metrics=MetricLog(folder.path, use_tensorboard=config.run.use_tensorboard),
            journal=Journal(folder.path),
            watch=watch,
            scorer=Scorer(env.rewards),
            algorithm=algorithm,
            trainers=processes.trainers,
        )

    async def close(self) -> None:
        """Stop the engine, keep the weights as they are, close the logs."""
        await self.engine.close()
        if self.trainer is not None:
            await self.trainer.save(str(self.folder.checkpoint))
        self.metrics.close()

    async def warm_start(self) -> None:
        """Imitate demonstrations, then publish and keep the result beside the checkpoint."""
        section = self.config.warm_start
        seed = self.config.run.seed
        number = section.demonstrations
        with self.watch.stage(DEMONSTRATIONS, number), self.console.stage(DEMONSTRATIONS, number) as bar:
            tasks = tasks_of(self.make_env(), section.warm_start_split)
            samples = await demonstrate(
                self.make_env, self.renderer, tasks, number, seed=seed, progress=bar.advance
            )
        self.trainer = await self.trainers.warm_start(self.source)
        steps = section.warm_start_steps
        with self.watch.stage(WARM_START, steps), self.console.stage(WARM_START, steps) as bar:
            await warm_start(
                self.trainer,
                samples,
                steps=steps,
                batch_size=section.warm_start_batch_size,
                seed=seed,
                progress=lambda report: bar.advance(1, loss=report.metrics["train/loss"]),
            )
        await self.trainer.publish(self.sink, version=0)
        learned = self.folder.path / "checkpoint-warm-start"
        await self.trainer.save(str(learned))
        self.source = replace(self.source, directory=learned)

    async def reinforce(self) -> None:
        """The RL iterations; the producer is closed however they end."""
        config = self.config
        self.trainer = await self.trainers.reinforcement(self.source, self.algorithm.loss)
        producer = self._producer()
        loop = Loop(
            producer=producer,
            trainer=self.trainer,
            algorithm=self.algorithm,
            sink=self.sink,
            num_steps=config.rollout.num_steps_per_rollout,
            watch=CorrectionWatch(config.algorithm.correction),
        )
        try:
            async with LagMeter() as lag:
                await self._iterations(loop, lag)
        finally:
            entries = [*leftover_entries(await producer.close(), loop.in_progress)]
            if entries:
                self.journal.write_step(self.step + 1, entries)

    async def _iterations(self, loop: Loop, lag: LagMeter) -> None:
        number = self.config.rollout.num_rollout
        with self.console.stage(RL, number) as bar:
            for step in range(number):
                lag.take()
                with self.watch.stage(RL):
                    iteration = await loop.iterate(step)
                    iteration.metrics["perf/event_loop_lag_max"] = lag.take()
                    self._record(iteration)
                if self._is_due(step + 1):
                    await self.evaluate(f"iteration {step + 1}", in_table=False)
                bar.advance(1, **self._shown(iteration))

    async def evaluate(self, name: str, *, in_table: bool = True) -> None:
        """Score the serving policy on held-out tasks, sampled and greedily; log and journal it."""
        section = self.config.eval
        number = section.eval_episodes
        if self.trainer is None and self.config.model.hf_checkpoint is None:
            number = min(number, _UNTRAINED_EPISODES)
        with self.watch.stage(EVALUATION, 2 * number):
            evaluations = {
                SAMPLED: await self._evaluation(section.eval_temperature, number),
                GREEDY: await self._evaluation(0.0, number),
            }
            self.milestones.append(Milestone(name, self.step, in_table, evaluations))
            for mode, evaluation in evaluations.items():
                # The name too: before and after a warm start are both step 0.
                self.journal.write_eval(f"{mode} {name}", self.step, evaluation.entries())
                self.latest |= _eval_metrics(mode, evaluation)
        self.metrics.log(self.step, self.latest)

    async def _evaluation(self, temperature: float, number: int) -> Evaluation:
        section = self.config.eval
        env = self.make_env()
        evaluator = Evaluator(
            make_env=self.make_env,
            make_agent=agent_factory(self.engine, self.renderer, self._sampling(temperature)),
            scorer=self.scorer,
            setting=EvalSetting(env.id, section.eval_split, temperature, env.breakdown),
            opponents=self.opponents,
        )
        return await evaluator.run(tasks_of(env, section.eval_split), number, seed=self.config.run.seed)

    def _producer(self) -> Producer:
        config = self.config
        player = GroupPlayer(
            make_env=self.make_env,
            make_agent=agent_factory(
                self.engine, self.renderer, self._sampling(config.rollout.rollout_temperature)
            ),
            scorer=self.scorer,
            size=config.rollout.n_samples_per_prompt,
            retries=config.rollout.max_episode_retries,
            seed=config.run.seed,
            shuffle_rewards=config.rollout.shuffle_rewards,
            opponents=self.opponents,
        )
        stream = TaskStream(tasks_of(self.make_env(), config.env.train_split), seed=config.run.seed)
        return Producer(stream.next, player.play, batch_size=config.rollout.prompts)

    def _sampling(self, temperature: float) -> SamplingSettings:
        rollout = self.config.rollout
        return SamplingSettings(
            temperature=temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            max_response_len=rollout.rollout_max_response_len,
        )

    def _record(self, iteration: Iteration) -> None:
        self.step = iteration.step + 1
        for warning in iteration.warnings:
            self.console.line(f"Warning: {warning}")
        self.journal.write_step(self.step, iteration_entries(iteration))
        counts = {f"engine/{name}": float(count) for name, count in self.engine.counts.items()}
        self.metrics.log(self.step, iteration.metrics | counts)

    def _is_due(self, step: int) -> bool:
        # The last one belongs to the table and is made when the stage has ended.
        return step % self.config.eval.eval_interval == 0 and step < self.config.rollout.num_rollout

    def _shown(self, iteration: Iteration) -> dict[str, float]:
        shown = {
            "reward": iteration.metrics["rollout/raw_reward"],
            "tok/s": iteration.metrics["perf/rollout_tok_per_s"],
        }
        evals = {
            mode: self.latest[f"eval/{mode}"] for mode in (SAMPLED, GREEDY) if f"eval/{mode}" in self.latest
        }
        return shown | evals


def _env_factory(config: RunConfig, addresses: Addresses) -> EnvFactory:
    return env_factory(
        config.env.env,
        config.env.env_kwargs,
        max_turns=config.rollout.max_turns,
        max_tokens=config.rollout.rollout_max_context_len,
        tools=config.env,
        addresses=addresses,
    )


def _longest(env: BaseEnv, config: RunConfig) -> int:
    """Most tokens of an episode; where nothing limits it, any number: constant weights divide by it."""
    return env.limits.max_tokens or config.engine.max_context_len or Limits().max_tokens or 1


def _eval_metrics(mode: str, evaluation: Evaluation) -> dict[str, float]:
    report = evaluation.report
    parts = {f"eval/{mode}/{part}": mean for part, mean in report.by.items()}
    rewards = {f"eval/{mode}/reward/{name}": mean for name, mean in report.parts.items()}
    return {
        f"eval/{mode}": report.mean,
        f"eval/{mode}/failures": float(sum(report.failures.values())),
        **parts,
        **rewards,
    }
