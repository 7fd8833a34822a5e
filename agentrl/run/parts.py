"""The parts of a run: those that are built once and do not change, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from agentrl.assembly.config import RunConfig
from agentrl.assembly.env import EnvFactory
from agentrl.checkpoints.source import ModelSource
from agentrl.config import effective_values
from agentrl.envs import PlayEpisode, Scorer, play
from agentrl.envs.opponents import Opponent
from agentrl.evaluation.episodes import Evaluation
from agentrl.observe import Journal, MetricLog, Tracker, WandbTracker
from agentrl.protocols import Renderer, Trainer
from agentrl.run.checkpoints import Begun, Checkpoint, Checkpoints, RunState, SavedMilestone
from agentrl.run.folder import RunFolder
from agentrl.run.stages import Stopwatch
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
    """The policy at one point of the run, scored on held-out tasks, by mode (sampled, greedy).

    in_table: whether it is a row of the table, rather than a point in the middle of RL. files: its
    journal, by mode.
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
