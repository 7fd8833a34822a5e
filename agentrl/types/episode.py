"""What happened and what it was worth: completions, turns, trajectories, episodes, verdicts, groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from agentrl.types.arrays import FloatArray, IntArray, freeze
from agentrl.types.world import Limits, Message, Observation, Restart, Task


class Finish(StrEnum):
    """Why the engine stopped: a stop string or token, the token limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Ending(StrEnum):
    """How an episode ended: by the world, by a limit, by us, or by a failure."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the engine sampled: T tokens, each with its logprob and its policy version.

    The stop token, or the tokens of the stop string, are part of it. logprobs are after
    temperature and before top-p and top-k.
    matched: the stop string, or the stop token id, that ended it.
    cached_tokens: prompt tokens that were not computed again.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish: Finish
    matched: str | int | None = None
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        shapes = {self.token_ids.shape, self.logprobs.shape, self.versions.shape}
        if len(shapes) != 1 or self.token_ids.ndim != 1:
            raise ValueError(f"token_ids, logprobs and versions must share one length, got {shapes}")
        for array in (self.token_ids, self.logprobs, self.versions):
            freeze(array)


@dataclass(frozen=True, slots=True, eq=False)
class TurnTokens:
    """The tokens one turn added: the world's part, then what the policy sampled."""

    world_ids: IntArray
    completion: Completion

    def __post_init__(self) -> None:
        freeze(self.world_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What the world showed and what the agent did. tokens is None for agents without tokens."""

    observation: Observation
    action: Message
    tokens: TurnTokens | None


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One unbroken prefix: the concatenation of its turns' tokens is what the model saw.

    parent: index of the trajectory of the same episode that this one continues, and reason, why it had
    to begin anew. What it carries over was written by the world as far as this one is concerned, so
    that every sampled token is trained exactly once.
    """

    turns: tuple[Turn, ...]
    parent: int | None = None
    reason: Restart | None = None

    def __post_init__(self) -> None:
        if (self.parent is None) != (self.reason is None):
            raise ValueError("a trajectory that continues another has a reason, any other has none")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode failed: stage (reset, tool, step, reward, act, episode), kind, detail."""

    stage: str
    kind: str
    detail: str

    @property
    def name(self) -> str:
        """The key it is counted under, e.g. `tool_timeout`."""
        return f"{self.stage}_{self.kind}"


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """Only what happened. Scores live in Verdicts.

    step_rewards: one per turn that the world answered, in order.
    counts: how often things happened in the world (tool_calls, rejected_calls, ...) and to the agent
        (`Act.counts`). Names that end in `/us` are microseconds of wall time.
    """

    id: str
    env_id: str
    task: Task
    seed: int
    limits: Limits
    trajectories: tuple[Trajectory, ...]
    step_rewards: tuple[float | None, ...]
    ending: Ending
    failure: Failure | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.ending is Ending.FAILED) != (self.failure is not None):
            raise ValueError("an episode carries a failure exactly when its ending is `failed`")

    @property
    def events(self) -> dict[str, int]:
        """`counts` without wall time: the same whenever the same episode is played again."""
        return {n: c for n, c in self.counts.items() if not n.endswith("/us") and "/took/" not in n}

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, in order, over all trajectories."""
        return tuple(turn for trajectory in self.trajectories for turn in trajectory.turns)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score of one episode. Scoring again writes a new Verdict, never a new Episode."""

    episode_id: str
    scorer: str
    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        if not np.isfinite(self.total):
            raise ValueError(f"a verdict's total must be finite, got {self.total}")


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One task, one seed: the siblings that played it and a verdict for each.

    start_version: the policy version that was serving when the group started.
    """

    id: str
    task: Task
    seed: int
    episodes: tuple[Episode, ...]
    verdicts: tuple[Verdict, ...]
    start_version: int = 0

    def __post_init__(self) -> None:
        if [e.id for e in self.episodes] != [v.episode_id for v in self.verdicts]:
            raise ValueError(f"group {self.id}: verdicts must stand in the order of the episodes")
        strangers = {e.id for e in self.episodes if e.task.id != self.task.id or e.seed != self.seed}
        if strangers:
            raise ValueError(f"group {self.id}: {strangers} played another task or seed")
