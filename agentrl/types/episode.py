"""Completions, turns, trajectories, episodes, verdicts and groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import PlainSerializer

from agentrl.types.arrays import FloatArray, IntArray, freeze
from agentrl.types.extras import Extra
from agentrl.types.messages import Message, Observation, Restart
from agentrl.types.statistics import UNTIMED, RequestTimes, ToolStats, Usage
from agentrl.types.world import Limits, RewardParts, StepReward, Task

AGENT = "agent"
"""The name of the only agent of a single-agent environment."""


class RolloutId(NamedTuple):
    """One agent's part of one episode: the unit of baselines and loss weights."""

    episode: str
    agent: str = AGENT


class Finish(StrEnum):
    """Why the engine stopped: a stop string or token, the token limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Ending(StrEnum):
    """How an episode ended: by the environment, by a limit, by cancellation, or by a failure."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The engine's output: T sampled tokens, each with its logprob and its policy version.

    The stop token, or the tokens of the stop string, are part of it.

    token_ids: int32 [T]. logprobs: float32 [T], in nats, after temperature and before top-p and top-k; where
    the extra `KEPT_IDS` has ids of a token, of the distribution renormalised over them.
    versions: int32 [T], of the policy that sampled the token. finish: why the engine stopped.
    matched: the stop string, or the stop token id, that ended it.
    cached_tokens: prompt tokens from the prefix cache (count).
    temperature: of the sampling; 0 = greedy.
    extras: more arrays of T tokens by name, see `Extra`. prompt_extras: the same of the last tokens of the
    prompt, of as many as no pass had computed before (`ROUTED_EXPERTS`).
    seconds: what the engine took. speculation: counts of its request by the names in `SPECULATION`; none
    where the engine did not decode speculatively.

    Raises:
        ValueError: the arrays have different lengths.
    """

    token_ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish: Finish
    matched: str | int | None = None
    cached_tokens: int = 0
    temperature: float = 1.0
    extras: Mapping[str, Extra] = field(default_factory=dict)
    seconds: RequestTimes = UNTIMED
    prompt_extras: Mapping[str, Extra] = field(default_factory=dict)
    speculation: Mapping[str, int] = field(default_factory=dict)

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
    """The tokens of one turn: those of the world, then the sampled ones.

    world_ids: int32 [number of the world's tokens]. completion: the tokens that were sampled after them.
    prompt_crc32: CRC-32 of the complete prompt that the engine received, its ids as int32; None = nothing was
    sampled, or it was not recorded.
    privileged_ids: of a turn that begins a trajectory: its `world_ids` as a teacher reads them, which
    hold more (`privileged_context_path`); None = the same.
    """

    world_ids: IntArray
    completion: Completion
    prompt_crc32: int | None = None
    privileged_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        freeze(self.world_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """An observation and the agent's action.

    tokens: of both; None for agents without tokens, such as scripts and chat endpoints.
    step: the index of the action's step in the episode, from 0; simultaneous actions share one.
    """

    observation: Observation
    action: Message
    tokens: TurnTokens | None
    step: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One agent's unbroken prefix: the concatenation of its turns' tokens is the model's context.

    turns: in order. agent: the agent of the turns. trainable: whether the trained policy took them; false for
    a frozen agent, such as an opponent.
    parent: index of the trajectory of the same episode that this one continues. reason: of the restart. The
    tokens that repeat the parent's turns count as the world's here, so that every sampled token is trained
    exactly once.

    Raises:
        ValueError: it has a parent without a reason, or a reason without a parent.
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
        """The key under which failures are counted, e.g. `tool_timeout`."""
        return f"{self.stage}_{self.kind}"


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """The record of an episode, without scores: these are in Verdicts.

    id: unique in its file of the journal. env_id: of the environment. task, seed, limits: what was played.
    trajectories: the conversation of each agent, in one piece unless a prefix was broken off.
    ending: how it ended. failure: why it failed; None = it did not.
    agents: those of the environment; a single one is called `agent`. frozen_agents: those of them that the
        trained policy did not play, such as opponents.
    step_rewards: one for each completed step, in order: a number for all agents, or one for each; None also
        in place of a step, where a custom generate function let the agent act again before one.
    counts: of events in the environment (tool_calls, rejected_calls, ...) and of the agents
        (`Act.counts`). tools: statistics of each tool's calls. usage: tokens as chat endpoints count them.
    seconds: wall time (seconds).

    Raises:
        ValueError: a failure without the ending `failed` or the other way round, a turn of an agent that is
            not in `agents`, a trainable trajectory of a frozen agent, or turns of an agent whose steps do not
            rise.
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
        if unknown := {trajectory.agent for trajectory in self.trajectories} - set(self.agents):
            raise ValueError(
                f"episode {self.id} has turns of {sorted(unknown)}, its agents are {self.agents}"
            )
        if wrong := [t.agent for t in self.trajectories if t.trainable == (t.agent in self.frozen_agents)]:
            raise ValueError(
                f"episode {self.id}: a trajectory of {wrong[0]} is trainable exactly if it is not frozen"
            )
        for agent in self.agents:
            steps = [turn.step for turn in self.turns_of(agent)]
            if any(step >= later for step, later in pairwise(steps)):
                raise ValueError(f"episode {self.id}: the steps of {agent}'s turns must rise, got {steps}")

    @property
    def events(self) -> dict[str, int]:
        """All counts, those of tools as `tool/NAME/...`: equal in every replay of the episode."""
        tool_counts = {
            f"tool/{name}/{event}": n for name, stats in self.tools.items() for event, n in stats.events()
        }
        return {**self.counts, **tool_counts}

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns of all agents, in the order of their steps."""
        turns = [turn for trajectory in self.trajectories for turn in trajectory.turns]
        return tuple(turns if len(self.agents) == 1 else sorted(turns, key=lambda turn: turn.step))

    @property
    def trained_agents(self) -> tuple[str, ...]:
        """The agents that the trained policy played: of several those with a turn, if any has one.

        A sub-agent that nobody called has done nothing that a reward could be for.
        """
        own = tuple(agent for agent in self.agents if agent not in self.frozen_agents)
        acted = {trajectory.agent for trajectory in self.trajectories if trajectory.turns}
        return tuple(agent for agent in own if agent in acted) or own

    @property
    def is_greedy(self) -> bool:
        """Whether the trained policy took the likeliest token throughout; judged by its first turn."""
        turns = (turn for own in self.trajectories if own.trainable for turn in own.turns)
        tokens = next((turn.tokens for turn in turns if turn.tokens is not None), None)
        return tokens is not None and tokens.completion.temperature == 0.0

    def turns_of(self, agent: str) -> tuple[Turn, ...]:
        """The turns of one agent, in order."""
        trajectories = (trajectory for trajectory in self.trajectories if trajectory.agent == agent)
        return tuple(turn for trajectory in trajectories for turn in trajectory.turns)

    def rewards_of(self, agent: str = AGENT) -> tuple[float | None, ...]:
        """An agent's rewards, one for each of its turns with a completed step; their sum is `total_of`.

        A reward is credited to the agent's last turn up to that step: where an opponent's move decides a
        game, its reward is credited to the agent's move before. Rewards before the agent's first turn are
        credited to that turn.
        """
        rewards = [_own(reward, agent) for reward in self.step_rewards]
        if len(self.agents) == 1:
            return tuple(rewards)
        steps = [turn.step for turn in self.turns_of(agent)]
        starts = [0, *steps[1:]] if steps else []
        step_starts = [start for step, start in zip(steps, starts, strict=True) if step < len(rewards)]
        ends = [*step_starts[1:], len(rewards)]
        return tuple(added(rewards[start:end]) for start, end in zip(step_starts, ends, strict=False))

    def total_of(self, agent: str = AGENT) -> float | None:
        """The sum of an agent's rewards of all steps, with its named parts where it has some."""
        return added([_own(reward, agent) for reward in self.step_rewards])


def _own(reward: StepReward, agent: str) -> float | None:
    return reward.get(agent) if isinstance(reward, Mapping) else reward


def added(rewards: list[float | None] | tuple[float | None, ...]) -> float | None:
    """The sum of the rewards that are not None, their named parts summed by name; None where all are."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2:
        return scored[0] if scored else None
    if not any(isinstance(reward, RewardParts) for reward in scored):
        return math.fsum(scored)
    parts: dict[str, float] = {}
    for reward in scored:
        own = reward.parts if isinstance(reward, RewardParts) else {}
        for name, part in own.items():
            parts[name] = parts.get(name, 0.0) + part
    return RewardParts(parts, total=math.fsum(scored))


@dataclass(frozen=True, slots=True)
class Verdict:
    """A score of one agent's part of an episode. Scoring again writes a new Verdict, never a new Episode.

    episode_id: of the episode. scorer: the name of what scored it. total: the score.
    parts: what the score consists of by name, unweighted: `env` is the sum of the step rewards, `env/NAME` a
    named part of these, any other the reward of that name.
    turn_rewards: of each of the agent's turns, where it was scored; part of the total. agent: whose score.

    Raises:
        ValueError: the total is not finite.
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
        """The agent's part of the episode that it scores."""
        return RolloutId(self.episode_id, self.agent)


class Rollout(NamedTuple):
    """One agent's part of an episode, and its verdict."""

    episode: Episode
    verdict: Verdict


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One task, one seed: the siblings that played it, and a verdict for each of their agents.

    verdicts: in the order of the episodes; those of one episode in the order of its agents.
    start_version, end_version: the policy versions that were served at the start of the group, and when all
        of its episodes had ended and were scored; None = the same.

    Raises:
        ValueError: verdicts in another order, a missing or repeated verdict, or an episode of another task.
    """

    id: str
    task: Task
    seed: int
    episodes: tuple[Episode, ...]
    verdicts: tuple[Verdict, ...]
    start_version: int = 0
    end_version: int | None = None

    def __post_init__(self) -> None:
        expected = [RolloutId(episode.id, agent) for episode in self.episodes for agent in episode.agents]
        if expected != [verdict.rollout_id for verdict in self.verdicts]:
            raise ValueError(
                f"group {self.id}: verdicts must stand in the order of the episodes and their agents"
            )
        foreign = {e.id for e in self.episodes if e.task.id != self.task.id or e.seed != self.seed}
        if foreign:
            raise ValueError(f"group {self.id}: {foreign} played another task or seed")

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents of its episodes, each once."""
        return tuple(dict.fromkeys(agent for episode in self.episodes for agent in episode.agents))

    @property
    def trained_agents(self) -> tuple[str, ...]:
        """The agents that the trained policy played in any of its episodes."""
        trained = {agent for episode in self.episodes for agent in episode.trained_agents}
        return tuple(agent for agent in self.agents if agent in trained)

    @property
    def greedy(self) -> tuple[Episode, ...]:
        """Episodes that the policy played greedily where it sampled in others: a baseline, not trained on."""
        greedy = tuple(episode for episode in self.episodes if episode.is_greedy)
        return () if len(greedy) == len(self.episodes) else greedy

    @property
    def trained_verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of the rollouts that are trained on: of agents that the policy played, but in the
        episodes of its greedy baseline."""
        greedy = {episode.id for episode in self.greedy}
        own = {RolloutId(e.id, agent) for e in self.episodes for agent in e.trained_agents}
        verdicts = (verdict for verdict in self.verdicts if verdict.rollout_id in own)
        return tuple(verdict for verdict in verdicts if verdict.episode_id not in greedy)

    @property
    def without_greedy(self) -> Group:
        """The group without the episodes of its greedy baseline."""
        baseline = {episode.id for episode in self.greedy}
        episodes = tuple(episode for episode in self.episodes if episode.id not in baseline)
        verdicts = tuple(verdict for verdict in self.verdicts if verdict.episode_id not in baseline)
        return replace(self, episodes=episodes, verdicts=verdicts)

    def siblings(self, agent: str) -> tuple[Rollout, ...]:
        """The rollouts of a trained agent in the episodes that it played: they can be compared."""
        episodes = {episode.id: episode for episode in self.episodes if agent in episode.trained_agents}
        verdicts = (verdict for verdict in self.verdicts if verdict.agent == agent)
        return tuple(Rollout(episodes[v.episode_id], v) for v in verdicts if v.episode_id in episodes)

    def verdicts_of(self, episode: Episode) -> tuple[Verdict, ...]:
        """The verdicts of one of its episodes, in the order of its agents."""
        return tuple(verdict for verdict in self.verdicts if verdict.episode_id == episode.id)
