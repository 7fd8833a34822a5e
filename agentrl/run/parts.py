"""The parts of a run: those that are built once and do not change, and its progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.algorithm import Algorithm, build_algorithm
from agentrl.assembly.config import RunConfig
from agentrl.assembly.data import RunData
from agentrl.assembly.env import EnvFactory
from agentrl.assembly.model import model_source, threads_for
from agentrl.assembly.policy import EngineSetup, build_engine
from agentrl.assembly.processes import RunProcesses
from agentrl.assembly.rewards import build_scorer
from agentrl.assembly.rollout import Filters, build_filters, build_play
from agentrl.checkpoints.fresh import draw_in_subprocess, draw_weights
from agentrl.checkpoints.source import ModelSource, open_source
from agentrl.config import effective_values
from agentrl.envs import AnyEnv, BaseEnv, PlayEpisode, Scorer, play
from agentrl.envs.dialect import Dialect
from agentrl.envs.opponents import Opponent
from agentrl.evaluation.episodes import Evaluation
from agentrl.observe import Journal, MetricLog, Tracker, WandbTracker
from agentrl.protocols import Engine, Renderer, Trainer
from agentrl.rollout.agent import SamplingSettings
from agentrl.rollout.config import RolloutConfig
from agentrl.run.checkpoints import Begun, Checkpoint, Checkpoints, RunState, SavedMilestone
from agentrl.run.folder import RunFolder
from agentrl.run.stages import Stopwatch
from agentrl.types import Limits, Task
from agentrl.view.console import RunConsole


@dataclass(frozen=True, slots=True)
class World:
    """The environment, its scoring, and the renderer of its messages as the model's tokens.

    opponents: for the agents that are not trained. play_episode: plays an episode, as `agentrl.play` does.
    """

    make_env: EnvFactory
    scorer: Scorer
    renderer: Renderer
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    play_episode: PlayEpisode = play


@dataclass(frozen=True, slots=True)
class Records:
    """The outputs of a run: console, metrics, journal, durations, checkpoints.

    attempt: the number of this process among those of the run, from 1. origin: the checkpoint that it
    resumes; None = the run begins.
    """

    folder: RunFolder
    console: RunConsole
    metrics: MetricLog
    journal: Journal
    watch: Stopwatch
    checkpoints: Checkpoints
    attempt: int
    origin: Checkpoint | None

    @classmethod
    def opened(cls, config: RunConfig, folder: RunFolder, console: RunConsole, begun: Begun) -> Records:
        """The outputs in the folder of a run; they continue what is there."""
        section, origin, observe = config.checkpoint, begun.origin, config.observe
        trackers: dict[str, Callable[[], Tracker]] = {}
        if observe.use_wandb:
            settings = effective_values(config)
            trackers["wandb"] = lambda: WandbTracker(folder.path.resolve(), observe, settings)
        metrics = MetricLog(
            folder.path,
            use_tensorboard=config.run.use_tensorboard,
            trackers=trackers,
            resumed_from=None if origin is None else origin.state.step,
            elapsed_s=0.0 if origin is None else origin.state.elapsed_s,
        )
        checkpoints = Checkpoints(
            folder.checkpoints, section.save_total_limit, section.metric_for_best_model, console.line
        )
        journal = Journal(folder.path)
        watch = Stopwatch(() if origin is None else origin.state.stages)
        return cls(folder, console, metrics, journal, watch, checkpoints, begun.attempt, origin)


@dataclass(frozen=True, slots=True)
class Milestone:
    """The policy at one point of the run, scored on held-out tasks, by evaluation: MODE (sampled, greedy), or
    NAME/MODE of a named set of prompts.

    in_table: whether it is a row of the table, rather than a point in the middle of RL. files: its
    journal, by evaluation.
    """

    name: str
    step: int
    in_table: bool
    evaluations: Mapping[str, Evaluation]
    files: Mapping[str, str]

    def saved(self) -> SavedMilestone:
        """As a checkpoint keeps it."""
        seconds = {mode: evaluation.report.seconds for mode, evaluation in self.evaluations.items()}
        return SavedMilestone(
            name=self.name, step=self.step, in_table=self.in_table, files=dict(self.files), seconds=seconds
        )


@dataclass(slots=True)
class Progress:
    """The state of a run.

    source: the initial weights of the next trainer. trainer: the current one. step: finished iterations of
    RL (count). latest: the metrics of the last evaluation. state: of the last step, for a checkpoint; None
    while there is none. saved_step: the step of the last checkpoint.
    """

    source: ModelSource
    trainer: Trainer | None = None
    step: int = 0
    milestones: list[Milestone] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)
    state: RunState | None = None
    saved_step: int | None = None


def source_of(
    config: RunConfig, env: AnyEnv, dialect: Dialect, data: RunData, records: Records
) -> ModelSource:
    """The model that RL begins with; of a resumed run, the one that it began with."""
    folder, directory = records.folder, config.model.hf_checkpoint
    if records.origin is not None and config.warm_starts:
        return open_source(folder.warm_start)
    if records.origin is not None:
        return open_source(directory or folder.model)
    return model_source(
        config.model, env, dialect, seed=config.run.seed, folder=folder.model, corpus=data.corpus(env)
    )


async def engine_of(
    config: RunConfig, source: ModelSource, env: BaseEnv, records: Records, processes: RunProcesses
) -> Engine | None:
    """The engine of the policy; None in a replay, for which this draws the weights of a new model."""
    if config.rollout.replay is not None:
        await _draw(source, inline=config.run.inline)
        return None
    setup = EngineSetup(
        records.folder.engine,
        records.console.line,
        # The dtype of published weights; with bf16, the dtype in the model's config.
        dtype=None if config.trainer.bf16 else "float32",
        process=processes.engine,
        threads=threads_for(source.config, config.run.num_threads),
    )
    return await build_engine(source, config.engine, env.limits, setup)


async def _draw(source: ModelSource, *, inline: bool) -> None:
    if inline and source.seed is not None:
        draw_weights(source.directory, source.seed)
    elif not inline:
        await asyncio.to_thread(draw_in_subprocess, source)


def algorithm_of(config: RunConfig, env: BaseEnv) -> Algorithm | None:
    """What a batch is trained with; None = the run only plays."""
    if config.rollout.debug_rollout_only:
        return None
    return build_algorithm(config.algorithm, max_length=_longest(env, config))


def filters_of(rollout: RolloutConfig) -> Filters:
    """The filters that act: those of groups unless the run replays, that of rollouts unless it only plays."""
    unused: tuple[str, ...] = ("rollout_sample_filter_path",) if rollout.debug_rollout_only else ()
    if rollout.replay is not None:
        unused = ("dynamic_sampling_filter_path", "buffer_filter_path")
    return build_filters(rollout.model_copy(update=dict.fromkeys(unused)))


def sampling_of(rollout: RolloutConfig, temperature: float) -> SamplingSettings:
    """How episodes are sampled at a temperature."""
    return SamplingSettings(
        temperature=temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_response_len=rollout.rollout_max_response_len,
    )


async def scoring_of(
    config: RunConfig, make_env: EnvFactory, task: Task | None, addresses: Addresses
) -> tuple[Scorer, PlayEpisode]:
    """The scorer, and what plays an episode; graders and functions by path are tried out on the task.

    A replay needs neither, and imports no such function.
    """
    if config.rollout.replay is not None:
        return Scorer(make_env().rewards), play
    scorer = await build_scorer(config.env, make_env, task, addresses)
    return scorer, await build_play(config.env.custom_generate_function_path, make_env, task)


def _longest(env: BaseEnv, config: RunConfig) -> int:
    """Most tokens of an episode, which constant weights divide by; where there is no limit, a default."""
    return env.limits.max_tokens or config.engine.max_context_len or Limits().max_tokens or 1
