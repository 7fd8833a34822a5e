"""Plays the recorded actions of an episode again, and compares what its environment returns.

An environment whose only chance is `self.rng`, with tools that always give the same results, returns
everything again. What differs is a tool or a reward that depends on the clock, on a service, or on other
episodes; or an environment that has changed since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from agentrl.envs.multi_agent import AnyEnv
from agentrl.envs.play import Frozen, PlayEpisode, play
from agentrl.envs.scoring import Scorer
from agentrl.errors import StageError, UserError
from agentrl.types import (
    Ending,
    Episode,
    Finish,
    Message,
    Observation,
    RewardParts,
    StepReward,
    Turn,
    Verdict,
)
from agentrl.types.seams import Act, Agent, Session, ToolSchema

_OF_AGENTS = ("act", "episode")
"""Stages that fail without the environment: a sampled turn, and an episode, mostly the time of its agent."""
NOTHING = "(nothing)"


class Difference(NamedTuple):
    """A value of an episode that is not the recorded one.

    turn: the step in which the agent observed it, or acted, from 1; None = of the episode.
    what: the value, such as `result of search`. expected: as recorded. actual: as returned now.
    """

    turn: int | None
    what: str
    expected: str
    actual: str


class RecordedAgent:
    """Plays the turns of one agent of a recorded episode, whatever it observes.

    After the last one it aborts the episode; where the agent failed there, it fails in the same way.
    """

    def __init__(self, episode: Episode, agent: str) -> None:
        self._episode = episode
        self._acts = _recorded_acts(episode, agent)

    async def act(self, observation: Observation, *, tools: Sequence[ToolSchema], session: Session) -> Act:
        """The recorded turn.

        Raises:
            StageError: the recorded failure.
        """
        del observation, tools, session
        act, failure = next(self._acts, None), self._episode.failure
        if act is not None:
            return act
        if failure is not None and failure.stage in _OF_AGENTS:
            raise StageError(failure.stage, failure.kind, failure.detail)
        return Act(Message("assistant"), None, finish=Finish.ABORT)

    async def close(self, session_id: str) -> None:
        """Nothing is open."""


async def play_again(env: AnyEnv, episode: Episode, play_episode: PlayEpisode = play) -> Episode:
    """The episode that the recorded actions give in a new instance, with the same task, seed and limits.

    Raises:
        UserError: the environment has other agents.
    """
    if tuple(env.possible_agents) != episode.agents:
        raise UserError(
            f"{env.id} has the agents {', '.join(env.possible_agents)}, and episode {episode.id} was played "
            f"by {', '.join(episode.agents)}; play it in the environment that it was recorded in."
        )
    env.limits = episode.limits
    agents: dict[str, Agent] = {}
    for name in episode.agents:
        agent = RecordedAgent(episode, name)
        agents[name] = Frozen(agent) if name in episode.frozen_agents else agent
    return await play_episode(env, agents, episode.task, seed=episode.seed, episode_id=episode.id)


async def replay_episode(
    env: AnyEnv, episode: Episode, verdicts: Sequence[Verdict] = (), play_episode: PlayEpisode = play
) -> list[Difference]:
    """Play an episode again and compare observations, step rewards, ending and counts of tools; and, of
    `verdicts`, the parts that are rewards of single episodes. Rewards of groups are not compared.

    play_episode: what played it.

    Raises:
        UserError: as for `play_again`.
    """
    marked = await Scorer(env.rewards).mark(await play_again(env, episode, play_episode))
    replayed = marked.episode
    differences = [d for agent in episode.agents for d in _observed(episode, replayed, agent)]
    differences.sort(key=lambda difference: difference.turn or 0)
    differences += _rewarded(episode, replayed)
    # The same calls of tools give the same counts; latencies differ.
    differences += _differing(None, "count of", _tool_counts(episode), _tool_counts(replayed))
    for verdict in verdicts:
        parts = marked.parts.get(verdict.agent, {})
        recorded = {name: verdict.parts.get(name) for name in parts}
        differences += _differing(None, "reward", _texts(recorded), _texts(parts))
    if (expected := _ending(episode)) != (actual := _ending(replayed)):
        differences.append(Difference(None, "ending", expected, actual))
    return differences


def _recorded_acts(episode: Episode, agent: str) -> Iterator[Act]:
    for trajectory in episode.trajectories:
        if trajectory.agent == agent:
            for index, turn in enumerate(trajectory.turns):
                restart = None if index else trajectory.reason
                yield Act(turn.action, turn.tokens, restart, _finish(episode, turn))


def _finish(episode: Episode, turn: Turn) -> Finish:
    """Of a turn without tokens, whose finish is not recorded: one that reached no step was unfinished."""
    if turn.step < len(episode.step_rewards):
        return Finish.STOP
    unfinished = {Ending.TRUNCATED: Finish.LENGTH, Ending.ABORTED: Finish.ABORT}
    return unfinished.get(episode.ending, Finish.STOP)


def _observed(episode: Episode, replayed: Episode, agent: str) -> Iterator[Difference]:
    """Differing messages of an agent's observations."""
    whose = f" of {agent}" if len(episode.agents) > 1 else ""
    for expected, actual in zip_longest(episode.turns_of(agent), replayed.turns_of(agent)):
        number = (expected or actual).step + 1
        if expected is None or actual is None:
            yield Difference(number, f"turn{whose}", _summary(expected), _summary(actual))
            continue
        for old, new in zip_longest(expected.observation, actual.observation):
            if old != new:
                yield Difference(number, f"{_name(old or new)}{whose}", *_message_texts(old, new))


def _rewarded(episode: Episode, replayed: Episode) -> Iterator[Difference]:
    pairs = zip_longest(map(_reward_text, episode.step_rewards), map(_reward_text, replayed.step_rewards))
    for number, (expected, actual) in enumerate(pairs, start=1):
        if expected != actual:
            yield Difference(number, "reward", expected or NOTHING, actual or NOTHING)


def _differing(
    turn: int | None, prefix: str, expected: Mapping[str, str], actual: Mapping[str, str]
) -> Iterator[Difference]:
    for name in sorted({**expected, **actual}):
        old, new = expected.get(name, NOTHING), actual.get(name, NOTHING)
        if old != new:
            yield Difference(turn, f"{prefix} {name}", old, new)


def _summary(turn: Turn | None) -> str:
    """The observation of a turn that only one of both episodes has."""
    return NOTHING if turn is None else "\n".join(message.text for message in turn.observation)


def _name(message: Message) -> str:
    return f"result of {message.name or 'a tool'}" if message.role == "tool" else f"{message.role} message"


def _message_texts(expected: Message | None, actual: Message | None) -> tuple[str, str]:
    """The texts of two messages; where these are equal, all of their fields."""
    old, new = (NOTHING if message is None else message.text for message in (expected, actual))
    return (old, new) if old != new else (repr(expected), repr(actual))


def _reward_text(reward: StepReward) -> str:
    return json.dumps(_plain(reward))


def _plain(reward: object) -> object:
    if isinstance(reward, RewardParts):
        return {"total": float(reward), **reward.parts}
    if isinstance(reward, Mapping):
        return {agent: _plain(own) for agent, own in reward.items()}
    return reward


def _tool_counts(episode: Episode) -> dict[str, str]:
    counts = {name: number for name, number in episode.events.items() if name.startswith("tool/")}
    return _texts(counts)


def _texts(values: Mapping[str, float | None]) -> dict[str, str]:
    return {name: NOTHING if value is None else f"{value:g}" for name, value in values.items()}


def _ending(episode: Episode) -> str:
    failure = episode.failure
    if failure is None:
        return episode.ending.value
    return f"{episode.ending.value}: {failure.stage} {failure.kind}, {failure.detail}"
