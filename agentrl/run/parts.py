"""What a run is made of: parts that are built once and stay as they are, and what changes."""

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
    """What is played, how it is scored, and how its words become the model's tokens.

    opponents: who plays the agents that are not trained.
    """

    make_env: EnvFactory
    scorer: Scorer
    renderer: Renderer
    opponents: Mapping[str, Opponent] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Records:
    """Where a run says what happens, and keeps it."""

    folder: RunFolder
    console: RunConsole
    metrics: MetricLog
    journal: Journal
    watch: Stopwatch


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
class Progress:
    """How far a run has come.

    source: the weights that a trainer would begin with. trainer: what learns now. step: iterations of RL that
    are done. latest: the metrics of the last evaluation.
    """

    source: ModelSource
    trainer: Trainer | None = None
    step: int = 0
    milestones: list[Milestone] = field(default_factory=list)
    latest: dict[str, float] = field(default_factory=dict)
