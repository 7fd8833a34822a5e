"""The parts of a run: those that are built once and do not change, and its progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.assembly.env import EnvFactory
from agentrl.checkpoints.source import ModelSource
from agentrl.envs import Scorer
from agentrl.envs.opponents import Opponent
from agentrl.evaluation.episodes import Evaluation
from agentrl.observe import Journal, MetricLog
from agentrl.protocols import Renderer, Trainer
from agentrl.run.folder import RunFolder
from agentrl.run.stages import Stopwatch
from agentrl.view.console import RunConsole


@dataclass(frozen=True, slots=True)
class World:
    """The environment, its scoring, and the renderer of its messages as the model's tokens.

    opponents: for the agents that are not trained.
    """

    make_env: EnvFactory
    scorer: Scorer
    renderer: Renderer
    opponents: Mapping[str, Opponent] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Records:
    """The outputs of a run: console, metrics, journal, durations."""

    folder: RunFolder
    console: RunConsole
    metrics: MetricLog
    journal: Journal
    watch: Stopwatch


@dataclass(frozen=True, slots=True)
class Milestone:
    """The policy at one point of the run, scored on held-out tasks, by mode (sampled, greedy).

    in_table: whether it is a row of the table, rather than a point in the middle of RL.
    """

    name: str
    step: int
    in_table: bool
    evaluations: Mapping[str, Evaluation]


@dataclass(slots=True)
class Progress:
    """The state of a run.

    source: the initial weights of the next trainer. trainer: the current one. step: finished iterations of
    RL (count). latest: the metrics of the last evaluation.
    """

    source: ModelSource
    trainer: Trainer | None = None
    step: int = 0
    milestones: list[Milestone] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)
