"""What happened and what it was worth: completions, turns, trajectories, episodes, verdicts, groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import PlainSerializer

from agentrl.types.arrays import FloatArray, IntArray, freeze
from agentrl.types.extras import Extra
from agentrl.types.statistics import ToolStats, Usage
from agentrl.types.world import Limits, Message, Observation, Restart, RewardParts, StepReward, Task

AGENT = "agent"
"""The name of the agent of an environment that has only one."""


class RolloutId(NamedTuple):
    """One agent's part of one episode: what baselines and loss weights count."""

    episode: str
    agent: str = AGENT


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
    temperature: what the tokens were sampled at; 0 = greedily.
    extras: more arrays of T tokens by name, see `Extra`.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish: Finish
    matched: str | int | None = None
    cached_tokens: int = 0
    temperature: float = 1.0
    extras: Mapping[str, Extra] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {self.token_ids.shape, self.logprobs.shape, self.versions.shape}
        if len(shapes) != 1 or self.token_ids.ndim != 1:
            raise ValueError(f"token_ids, logprobs and versions must share one length, got {shapes}")
        if wrong := [name for name, extra in self.extras.items() if len(extra) != len(self.token_ids)]:
            raise ValueError(f"extras need a value for each of {len(self.token_ids)} tokens: {wrong}")
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
    """What the world showed and what the agent did. tokens is None for agents without tokens.

    step: which step of the episode, from 0, the action was part of; simultaneous moves share one.
    """

    observation: Observation
    action: Message
    tokens: TurnTokens | None
    step: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One agent's unbroken prefix: the concatenation of its turns' tokens is what the model saw.

    agent: whose turns these are. trainable: whether the policy that is trained took them; false for a frozen
    agent, such as an opponent.
    parent: index of the trajectory of the same episode that this one continues, and reason, why it had
    to begin anew. What it carries over was written by the world as far as this one is concerned, so
    that every sampled token is trained exactly once.
    """

    turns: tuple[Turn, ...]
    parent: int | None = None
    reason: Restart | None = None
    agent: str = AGENT
    trainable: bool = True

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

    agents: those that the environment may have act; one alone is called `agent`. frozen_agents: those of them
    that
        somebody else than the policy played, such as opponents: they are not trained.
    step_rewards: one per step that the world answered, in order: a number for all agents, or one for each.
    counts: how often things happened in the world (tool_calls, rejected_calls, ...) and to the agents
        (`Act.counts`). tools: what happened to the calls of each tool. usage: what chat endpoints counted.
    seconds: wall time.

    Raises:
        ValueError: a failure without the ending `failed` or the other way round, a turn of an agent that is
            none of `agents`, a trainable
            trajectory of a frozen agent, or turns of an agent whose steps do not rise.
    """

    id: str
    env_id: str
    task: Task
    seed: int
    limits: Annotated[Limits, PlainSerializer(asdict)]
    trajectories: tuple[Trajectory, ...]
    step_rewards: tuple[StepReward, ...]
    ending: Ending
    failure: Failure | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    tools: Mapping[str, ToolStats] = field(default_factory=dict)
    usage: Usage | None = None
    agents: tuple[str, ...] = (AGENT,)
    frozen_agents: tuple[str, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.ending is Ending.FAILED) != (self.failure is not None):
            raise ValueError("an episode carries a failure exactly when its ending is `failed`")
        if strangers := {one.agent for one in self.trajectories} - set(self.agents):
            raise ValueError(
                f"episode {self.id} has turns of {sorted(strangers)}, its agents are {self.agents}"
            )
        if wrong := [
            one.agent for one in self.trajectories if one.trainable == (one.agent in self.frozen_agents)
        ]:
            raise ValueError(
                f"episode {self.id}: a trajectory of {wrong[0]} is trainable exactly if it is not frozen"
            )
        for agent in self.agents:
            steps = [turn.step for turn in self.turns_of(agent)]
            if any(step >= later for step, later in pairwise(steps)):
                raise ValueError(f"episode {self.id}: the steps of {agent}'s turns must rise, got {steps}")

    @property
    def events(self) -> dict[str, int]:
        """All counts, those of tools as `tool/NAME/...`: the same when the same episode is played again."""
        of_tools = {f"tool/{name}/{what}": n for name, one in self.tools.items() for what, n in one.events()}
        return {**self.counts, **of_tools}

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns of all agents, in the order of their steps."""
        turns = [turn for trajectory in self.trajectories for turn in trajectory.turns]
        return tuple(turns if len(self.agents) == 1 else sorted(turns, key=lambda turn: turn.step))

    @property
    def trained_agents(self) -> tuple[str, ...]:
        """The agents whose turns the policy took that is trained."""
        return tuple(agent for agent in self.agents if agent not in self.frozen_agents)

    def turns_of(self, agent: str) -> tuple[Turn, ...]:
        """The turns of one agent, in order."""
        mine = (one for one in self.trajectories if one.agent == agent)
        return tuple(turn for trajectory in mine for turn in trajectory.turns)

    def rewards_of(self, agent: str = AGENT) -> tuple[float | None, ...]:
        """What an agent got, one for each of its turns that the world answered; they sum to all that it got.

        A reward is due to the agent's last turn up to that step: where an opponent's move decides a game,
        what it brings is due to the move before it. What came before its first turn is due to that one.
        """
        rewards = [_own(reward, agent) for reward in self.step_rewards]
        if len(self.agents) == 1:
            return tuple(rewards)
        steps = [turn.step for turn in self.turns_of(agent)]
        starts = [0, *steps[1:]] if steps else []
        answered = [start for step, start in zip(steps, starts, strict=True) if step < len(rewards)]
        ends = [*answered[1:], len(rewards)]
        return tuple(added(rewards[start:end]) for start, end in zip(answered, ends, strict=False))

    def total_of(self, agent: str = AGENT) -> float | None:
        """The sum of all that an agent got, turn or no turn; with its named parts, where it has some."""
        return added([_own(reward, agent) for reward in self.step_rewards])


def _own(reward: StepReward, agent: str) -> float | None:
    return reward.get(agent) if isinstance(reward, Mapping) else reward


def added(rewards: list[float | None] | tuple[float | None, ...]) -> float | None:
    """The sum of the rewards that are not None, their named parts summed by name; None where all are."""
    given = [reward for reward in rewards if reward is not None]
    if len(given) < 2:
        return given[0] if given else None
    if not any(isinstance(reward, RewardParts) for reward in given):
        return math.fsum(given)
    parts: dict[str, float] = {}
    for reward in given:
        own = reward.parts if isinstance(reward, RewardParts) else {}
        for name, part in own.items():
            parts[name] = parts.get(name, 0.0) + part
    return RewardParts(parts, total=math.fsum(given))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score of one agent's part of an episode. Scoring again writes a new Verdict, never a new Episode.

    turn_rewards: what each of the agent's turns was worth, where it was scored; part of the total.
    """

    episode_id: str
    scorer: str
    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float | None, ...] = ()
    agent: str = AGENT

    def __post_init__(self) -> None:
        if not np.isfinite(self.total):
            raise ValueError(f"a verdict's total must be finite, got {self.total}")

    @property
    def rollout_id(self) -> RolloutId:
        """Whose part of which episode it scores."""
        return RolloutId(self.episode_id, self.agent)


class Rollout(NamedTuple):
    """One agent's part of an episode, and its verdict."""

    episode: Episode
    verdict: Verdict


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One task, one seed: the siblings that played it, and a verdict for each of their agents.

    verdicts: in the order of the episodes; those of one episode in the order of its agents.
    start_version: the policy version that was serving when the group started.

    Raises:
        ValueError: verdicts in another order, one that is missing or there twice, or an episode of another
            task.
    """

    id: str
    task: Task
    seed: int
    episodes: tuple[Episode, ...]
    verdicts: tuple[Verdict, ...]
    start_version: int = 0

    def __post_init__(self) -> None:
        wanted = [RolloutId(episode.id, agent) for episode in self.episodes for agent in episode.agents]
        if wanted != [verdict.rollout_id for verdict in self.verdicts]:
            raise ValueError(
                f"group {self.id}: verdicts must stand in the order of the episodes and their agents"
            )
        strangers = {e.id for e in self.episodes if e.task.id != self.task.id or e.seed != self.seed}
        if strangers:
            raise ValueError(f"group {self.id}: {strangers} played another task or seed")

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents of its episodes, each once."""
        return tuple(dict.fromkeys(agent for episode in self.episodes for agent in episode.agents))

    @property
    def trained_agents(self) -> tuple[str, ...]:
        """The agents whose turns the policy took that is trained, in any of its episodes."""
        trained = {agent for episode in self.episodes for agent in episode.trained_agents}
        return tuple(agent for agent in self.agents if agent in trained)

    def siblings(self, agent: str) -> tuple[Rollout, ...]:
        """What one agent did in each episode: rollouts in the same role, which can be compared."""
        episodes = {episode.id: episode for episode in self.episodes}
        mine = (verdict for verdict in self.verdicts if verdict.agent == agent)
        return tuple(Rollout(episodes[verdict.episode_id], verdict) for verdict in mine)

    def verdicts_of(self, episode: Episode) -> tuple[Verdict, ...]:
        """The verdicts of one of its episodes, in the order of its agents."""
        return tuple(verdict for verdict in self.verdicts if verdict.episode_id == episode.id)
