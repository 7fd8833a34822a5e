"""The parts of a run: those that are built once and do not change, and its progress."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.assembly.addresses import Addresses
from agentrl.assembly.algorithm import Algorithm, build_algorithm, check_agents
from agentrl.assembly.cards import serving_of
from agentrl.assembly.cluster import EVALUATIONS, POLICY, title_of
from agentrl.assembly.config import RunConfig, SftConfig
from agentrl.assembly.data import RunData
from agentrl.assembly.env import EnvFactory
from agentrl.assembly.fleet import ServedAdapters
from agentrl.assembly.functions import CALLBACK
from agentrl.assembly.load import read_run
from agentrl.assembly.model import model_source, threads_for
from agentrl.assembly.places import ProcessPlaces
from agentrl.assembly.policy import EngineSetup, agent_factory, build_engine
from agentrl.assembly.processes import EVAL_ENGINE, RunProcesses
from agentrl.assembly.rewards import build_scorer
from agentrl.assembly.rollout import Filters, build_filters, build_play
from agentrl.config import effective_values
from agentrl.envs import AnyEnv, BaseEnv, PlayEpisode, Scorer, play
from agentrl.envs.dialect import Dialect
from agentrl.envs.opponents import Opponent
from agentrl.envs.resuming import StoppableEpisodes
from agentrl.evaluation.episodes import Evaluation
from agentrl.records import Earlier, Journal, MetricLog, Tracker, WandbTracker
from agentrl.records.config import ObserveConfig
from agentrl.records.diagnoses import Diagnoses
from agentrl.records.metrics import Callback
from agentrl.records.prometheus import PrometheusTracker
from agentrl.records.trends import RunFacts
from agentrl.rollout.agent import SamplingSettings
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.group import GroupPlayer, GroupStep
from agentrl.rollout.group_log import GroupLog
from agentrl.rollout.saved import SavedGroups
from agentrl.run.checkpoints import Begun, Checkpoint, Checkpoints, RunState, SavedMilestone
from agentrl.run.folder import RunFolder
from agentrl.run.monitor import Monitor
from agentrl.run.stages import Stopwatch
from agentrl.runtime.activity import STARTS_ENGINE, Activities, working
from agentrl.runtime.clocks import Waits
from agentrl.types import ExpertLayers, Limits, Task
from agentrl.types.seams import Engine, Policy, Renderer, Trainer
from agentrl.view.console import RunConsole
from agentrl.weights.hf.fresh import draw_in_subprocess, draw_weights
from agentrl.weights.hf.source import ModelSource, open_source


# Where the metrics of a run go, besides metrics.jsonl.
def opened_metrics(
    config: RunConfig, folder: Path, console: RunConsole, callback: Callback | None, earlier: Earlier | None
) -> MetricLog:
    """The metrics of a run, with the trackers of its settings.

    folder: of the run. earlier: see `MetricLog`.
    """
    observe = config.observe
    trackers: dict[str, Callable[[], Tracker]] = {}
    if callback is not None:
        trackers["callback"] = lambda: callback
    if observe.use_wandb:
        settings = effective_values(config)
        trackers["wandb"] = lambda: WandbTracker(folder.resolve(), observe, settings)
    if observe.use_prometheus:
        trackers["prometheus"] = lambda: _prometheus(folder, observe, console)
    return MetricLog(
        folder,
        use_tensorboard=config.run.use_tensorboard,
        trackers=trackers,
        earlier=earlier,
        on_event=lambda sentence: console.line(f"Warning: {sentence}"),
    )


def _prometheus(run_dir: Path, observe: ObserveConfig, console: RunConsole) -> Tracker:
    tracker = PrometheusTracker(run_dir, observe.prometheus_host, observe.prometheus_port)
    console.line(f"Prometheus: http://{observe.prometheus_host}:{tracker.port}/metrics")
    return tracker


@dataclass(frozen=True, slots=True)
class World:
    """The environment, its scoring, and the renderer of its messages as the model's tokens.

    opponents: for the agents that are not trained. play_episode: plays an episode, as `agentrl.play` does.
    expert_layers: whose experts the engine returns; None = it returns none.
    """

    make_env: EnvFactory
    scorer: Scorer
    renderer: Renderer
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    play_episode: PlayEpisode = play
    expert_layers: ExpertLayers | None = None


@dataclass(frozen=True, slots=True)
class Records:
    """The outputs of a run: console, metrics, journal, durations, checkpoints.

    attempt: the number of this process among those of the run, from 1. origin: the checkpoint that it
    resumes; None = the run begins. diagnoses: of what `log` has logged. monitor: of what the run does.
    groups: keeps what groups in flight have played; None = none is in flight while others are trained.
    callback: the user's function; None = there is none.
    """

    folder: RunFolder
    console: RunConsole
    metrics: MetricLog
    journal: Journal
    watch: Stopwatch
    checkpoints: Checkpoints
    attempt: int
    origin: Checkpoint | None
    diagnoses: Diagnoses
    monitor: Monitor
    groups: GroupLog | None
    callback: Callback | None = None

    @property
    def are_enough(self) -> bool:
        """Whether the callback has ended the run."""
        return self.callback is not None and self.callback.ends_run

    @property
    def note(self) -> Callable[[GroupStep], None] | None:
        """Keeps a step of a group; None = nobody does."""
        return None if self.groups is None else self.groups.add

    def resumed_groups(self) -> SavedGroups:
        """The groups that were in flight at the checkpoint."""
        if self.groups is None or self.origin is None:
            return SavedGroups()
        return self.groups.resume(self.origin.groups, self.origin.state.version)

    def forget(self, state: RunState) -> None:
        """Forget the groups that no run which resumes from there plays."""
        if self.groups is not None:
            self.groups.keep(state.pending, state.next_ordinal)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step of RL or SFT, and warn of what is diagnosed by them."""
        was_enough = self.are_enough
        self.metrics.log(step, metrics)
        if self.are_enough and not was_enough:
            self.console.line(f"The callback ends the run after step {step}.")
        for diagnosis in self.diagnoses.add(step, metrics):
            self.console.line(f"Warning: {diagnosis}")

    @classmethod
    def opened(cls, config: RunConfig, folder: RunFolder, console: RunConsole, begun: Begun) -> Records:
        """The outputs in the folder of a run; they continue what is there."""
        section, origin, observe = config.checkpoint, begun.origin, config.observe
        earlier = None if origin is None else Earlier(origin.state.step, origin.state.elapsed_s)
        callback = None if observe.callback is None else Callback(CALLBACK.at(observe.callback))
        metrics = opened_metrics(config, folder.path, console, callback, earlier)
        checkpoints = Checkpoints(
            folder.checkpoints, section.save_total_limit, config.best_metric, console.line
        )
        journal = Journal(folder.path)
        watch = Stopwatch(() if origin is None else origin.state.stages)
        monitor = Monitor(
            Activities(),
            folder.path,
            console.line,
            trace=folder.timeline(begun.attempt),
            hang_warning_s=observe.hang_warning_s,
        )
        monitor.start = begun.start
        return cls(
            *(folder, console, metrics, journal, watch, checkpoints, begun.attempt, origin),
            diagnoses=Diagnoses.opened(folder.path, is_supervised=isinstance(config, SftConfig)),
            monitor=monitor,
            groups=GroupLog(journal.run, console.line) if config.rollout.is_async else None,
            callback=callback,
        )

    def placed(self, places: ProcessPlaces) -> None:
        """Show what there is to know of the places of the run, and the dashboard of a cluster."""
        self.monitor.dashboard = places.dashboard
        if (notice := places.notice) is not None:
            self.console.line(notice)

    @property
    def dashboard(self) -> dict[str, str]:
        """That of the run's cluster, as a fact of the report; {} = there is none."""
        return {"dashboard of Ray": self.monitor.dashboard} if self.monitor.dashboard else {}


@dataclass(frozen=True, slots=True)
class Milestone:
    """The policy at one point of the run, scored on held-out tasks, by evaluation: MODE (sampled, greedy), or
    NAME/MODE of a named set of prompts.

    in_table: whether it is a row of the table, rather than a point in the middle of RL. files: its
    journal, by evaluation. own: metrics of a function of the user.
    """

    name: str
    step: int
    in_table: bool
    evaluations: Mapping[str, Evaluation]
    files: Mapping[str, str]
    own: Mapping[str, float] = field(default_factory=dict)

    def saved(self) -> SavedMilestone:
        """As a checkpoint keeps it."""
        seconds = {mode: evaluation.report.seconds for mode, evaluation in self.evaluations.items()}
        return SavedMilestone(
            name=self.name,
            step=self.step,
            in_table=self.in_table,
            files=dict(self.files),
            seconds=seconds,
            own=dict(self.own),
        )


@dataclass(slots=True)
class Progress:
    """The state of a run.

    source: the initial weights of the next trainer. trainer: the current one. step: finished iterations of
    RL (count). latest: the metrics of the last evaluation. state: of the last step, for a checkpoint; None
    while there is none. saved_step: the step of the last checkpoint. idle_rollouts: the last iterations in a
    row that trained on nothing (count).
    """

    source: ModelSource
    trainer: Trainer | None = None
    step: int = 0
    milestones: list[Milestone] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)
    state: RunState | None = None
    saved_step: int | None = None
    idle_rollouts: int = 0


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


async def engines_of(
    config: RunConfig,
    source: ModelSource,
    env: BaseEnv,
    records: Records,
    processes: RunProcesses,
    *,
    evaluates: bool,
) -> tuple[Engine | None, Engine | None]:
    """The engine of the policy, and a second one of its kind for evaluations alone; None = there is none.

    In a replay there is neither, and this draws the weights of a new model. evaluates: whether there are
    held-out tasks.
    """
    records.monitor.follow(lambda: processes.trainers.where)
    if config.rollout.replay is not None:
        await _draw(source, inline=config.run.inline)
        return None, None
    for line in (serving := serving_of(config, source.config, env)).lines:
        records.console.line(line)
    setup = EngineSetup(
        *(records.folder.engine, records.console.line),
        releases=config.trainer.offloads_rollout,
        process=processes.engine,
        threads=threads_for(source.config, config.run.num_threads),
        launcher=processes.places.launcher(POLICY),
        max_in_flight=serving.max_in_flight,
        arguments=serving.arguments,
        dtype=config.trainer.published_dtype,
        adapters=ServedAdapters.of(config),
    )
    with working(STARTS_ENGINE):
        engine = await build_engine(source, config.engine, env.limits, setup)
    if not (evaluates and config.has_eval_engine):
        return engine, None
    second = setup._replace(
        folder=setup.folder / EVAL_ENGINE,
        releases=False,
        arguments={},
        process=processes.eval_engine,
        launcher=processes.places.launcher(EVALUATIONS),
        title=title_of(EVALUATIONS),
    )
    async with AsyncExitStack() as started:
        started.push_async_callback(engine.close)
        # The first engine has drawn the weights of a new model.
        eval_engine = await build_engine(replace(source, seed=None), config.engine, env.limits, second)
        started.pop_all()
    return engine, eval_engine


async def _draw(source: ModelSource, *, inline: bool) -> None:
    if inline and source.seed is not None:
        draw_weights(source.directory, source.seed)
    elif not inline:
        await asyncio.to_thread(draw_in_subprocess, source)


def algorithm_of(config: RunConfig, env: BaseEnv) -> Algorithm | None:
    """What a batch is trained with; None = the run only plays.

    Raises:
        ConfigError: as for `build_algorithm` and `check_agents`; or the folder that is replayed holds no run.
    """
    rollout = config.rollout
    if rollout.debug_rollout_only:
        return None
    check_agents(config.algorithm, env.possible_agents)
    played = rollout if rollout.replay is None else read_run(Path(rollout.replay)).rollout
    is_older = played.plays_off_policy_by or rollout.data_buffer_groups
    staleness = played.max_staleness if is_older else None
    return build_algorithm(
        config.algorithm,
        max_length=_longest(env, config),
        max_staleness=staleness,
        max_tokens=config.trainer.max_tokens_per_gpu,
    )


def player_of(
    config: RunConfig,
    world: World,
    engine: Policy,
    filters: Filters,
    absence: Waits,
    *,
    may_move: bool = False,
) -> GroupPlayer:
    """What plays the groups of a run. absence: of the engine. may_move: they may go on in another process."""
    rollout = config.rollout
    # A synchronous run that resumes plays its batch again, and is bit-equal to one that was not stopped.
    stops = (rollout.is_async or may_move) and world.play_episode is play
    make_agent, make_greedy_agent = (
        agent_factory(
            engine,
            world.renderer,
            replace(
                sampling_of(rollout, temperature),
                return_kept_ids=config.replays_sampling_mask,
                return_routed_experts=world.expert_layers,
            ),
        )
        for temperature in (rollout.rollout_temperature, 0.0)
    )
    has_baseline = config.algorithm.advantage_estimator.plays_greedy
    return GroupPlayer(
        make_env=world.make_env,
        make_agent=make_agent,
        make_greedy_agent=make_greedy_agent if has_baseline else None,
        scorer=world.scorer,
        size=rollout.n_samples_per_prompt,
        retries=rollout.max_episode_retries,
        seed=config.run.seed,
        shuffle_rewards=rollout.shuffle_rewards,
        opponents=world.opponents,
        drops=filters.drops,
        play_episode=world.play_episode,
        timeout_s=rollout.group_timeout_s or math.inf,
        episodes=StoppableEpisodes() if stops else None,
        absence=absence,
        privileged=filters.privileged,
    )


def facts_of(config: RunConfig, env: BaseEnv) -> RunFacts:
    """What the diagnoses of a run take from its configuration and its environment."""
    algorithm = config.algorithm
    return RunFacts(
        expert_score=env.expert_score,
        chance_score=env.chance_score,
        compares=algorithm.compares and algorithm.custom_advantage_function_path is None,
        is_untrained=config.model.hf_checkpoint is None and not config.warm_starts,
        eval_episodes=config.eval.eval_episodes * config.eval.n_samples_per_eval_prompt,
    )


def filters_of(rollout: RolloutConfig) -> Filters:
    """The filters that act: those of groups unless the run replays, that of rollouts unless it only plays."""
    unused = [name for name in rollout.inactive if name.endswith("_path")]
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
    return scorer, await build_play(config.env, make_env, task)


def _longest(env: BaseEnv, config: RunConfig) -> int:
    """Most tokens of an episode, which constant weights divide by; where there is no limit, a default."""
    return env.limits.max_tokens or config.engine.max_context_len or Limits().max_tokens or 1
