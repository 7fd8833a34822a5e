"""Episodes that stop between two turns, or between two tokens of one, and go on later, elsewhere.

    episodes = StoppableEpisodes()
    playing = asyncio.create_task(episodes.play(env, agent, task, sampling_seed=1))
    ...
    await episodes.stop()
    saved = await playing                     # an EpisodeInProgress, or the Episode where that was over
    text = json.dumps(saved.to_json())

    saved = EpisodeInProgress.of_json(json.loads(text))
    episode = await StoppableEpisodes().resume(new_env, new_agent, saved)

An environment takes part by `save_state`, an agent as a `ResumableAgent`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from pydantic import TypeAdapter

from agentrl.envs.base import BaseEnv
from agentrl.envs.boundary import AnyEnvironment, call_load_state, call_save_state
from agentrl.envs.multi_agent import AnyEnv
from agentrl.envs.play import Flow, Game, PlaysItself, session_id_of
from agentrl.errors import AgentRLError, StageError, UserError
from agentrl.records import lines
from agentrl.runtime.stage import stage
from agentrl.types import (
    JSON,
    Ending,
    Episode,
    History,
    Message,
    Observation,
    Restart,
    StepReward,
    Task,
    Turn,
    Usage,
)
from agentrl.types.seams import Act, Agent, ToolSchema

PLAYED_AGAIN = "played_again"
"""The count of an episode that began again, since its world or an agent could not save its state."""
_SAVE_TIMEOUT_S = 10.0


class TurnStoppedError(AgentRLError):
    """An agent's turn was stopped between two tokens; the agent can save it."""


class _EpisodeStoppedError(AgentRLError):
    """The episode was stopped at a boundary of turns."""


def saves_state(env: AnyEnv) -> bool:
    """Whether the class of an environment has a `save_state` of its own."""
    return type(env).save_state is not BaseEnv.save_state


@runtime_checkable
class ResumableAgent(Protocol):
    """An agent that can stop in a turn, save its state, and go on."""

    async def stop(self, session_id: str) -> None:
        """Stop at the next token: `act` then raises TurnStoppedError, unless its turn was complete."""

    def save_state(self, tools: Sequence[ToolSchema]) -> JSON:
        """What is not in its turns, and the turn that was stopped. tools: that are on offer now."""

    def load_state(
        self, state: JSON, trajectories: Sequence[SavedTurns], tools: Sequence[ToolSchema]
    ) -> None:
        """Be as far as the agent that saved this, after these turns of its own; the next `act` completes a
        turn that was stopped. tools: that are on offer now."""


class SavedTurns(NamedTuple):
    """The turns of one trajectory so far, or those that are new.

    reason: of the restart; None = it is its agent's first. replaces: the observation of its first turn is a
    `History`.
    """

    agent: str
    reason: Restart | None
    turns: tuple[Turn, ...]
    replaces: bool = False

    @classmethod
    def of(cls, agent: str, reason: Restart | None, turns: Sequence[Turn], since: int = 0) -> SavedTurns:
        """The turns of a trajectory, but for the first `since`."""
        return cls(agent, reason, tuple(turns[since:]), isinstance(turns[0].observation, History))

    def restored(self) -> SavedTurns:
        """As it was, after it has been JSON: there a `History` is a list like any other."""
        if not self.replaces or self.reason is None:
            return self
        first, *rest = self.turns
        first = replace(first, observation=History(first.observation, self.reason))
        return self._replace(turns=(first, *rest))


@dataclass(frozen=True, slots=True, eq=False)
class SavedPlay:
    """What was played before the stop.

    world: the environment's state. agents: that of each agent. unseen: observations that an agent has not
    acted on; rewritten: why those of an agent replace all before. acts: turns of agents that had ended while
    another one's was stopped. counts, usage: of the agents. clock_s, wall_s: the time so far, by the clock of
    the episode's deadline, and on the wall (seconds).
    """

    world: JSON
    agents: Mapping[str, JSON]
    trajectories: tuple[SavedTurns, ...]
    step_rewards: tuple[StepReward, ...]
    unseen: Mapping[str, Observation]
    rewritten: Mapping[str, Restart]
    acts: Mapping[str, Act]
    counts: Mapping[str, int]
    usage: Usage | None
    clock_s: float
    wall_s: float = 0.0

    @property
    def observations(self) -> Mapping[str, Observation]:
        """Those that an agent has not acted on, or whose act is not recorded yet."""
        return {
            name: History(messages, self.rewritten[name]) if name in self.rewritten else messages
            for name, messages in self.unseen.items()
        }

    @property
    def unrecorded(self) -> Iterator[SavedTurns]:
        """The turns in `acts`."""
        for name, act in self.acts.items():
            turn = Turn(self.observations[name], act.message, act.tokens)
            yield SavedTurns(name, act.restart, (turn,))


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeInProgress:
    """An episode that was stopped; `StoppableEpisodes.resume` goes on with it.

    id, env_id, task, seed, sampling_seed: those of the episode. played: None = the world or an agent cannot
    save its state, so the episode begins again, with the same seeds. times_again: how often it did (count).
    """

    id: str
    env_id: str
    task: Task
    seed: int
    sampling_seed: int
    played: SavedPlay | None
    times_again: int = 0

    def to_json(self) -> JSON:
        """The episode as JSON."""
        return lines.as_json(_adapter(), self)

    @classmethod
    def of_json(cls, value: JSON) -> EpisodeInProgress:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is no such episode.
        """
        return _adapter().validate_python(value)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[EpisodeInProgress]:
    return TypeAdapter(EpisodeInProgress)


OnStep: TypeAlias = Callable[[int, EpisodeInProgress], None]
"""Called between two turns with the episode so far: `trajectories` and `step_rewards` are those since the
call before, at which so many steps had been played (count)."""


class _Resumable(Flow):
    """An episode that stops, and begins where another one was stopped. on_step: see `StoppableEpisodes`."""

    def __init__(
        self,
        episodes: StoppableEpisodes,
        begun: EpisodeInProgress | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        self._episodes, self._on_step = episodes, on_step
        self._times_again = 0 if begun is None else begun.times_again + (begun.played is None)
        # How much the last call of `on_step` had: turns of each trajectory, and steps (counts).
        self._num_turns: list[int] = []
        self._num_steps = 0
        self._played = None if begun is None else begun.played
        self._agents: dict[str, ResumableAgent] = {}
        self._acts: dict[str, Act] = {}
        self._stopped: set[str] = set()
        self._saved: EpisodeInProgress | None = None

    async def played(self, game: Game) -> Episode | EpisodeInProgress:
        """Play to the end or to the stop."""
        game.flow, played, wall_s = self, self._played, 0.0
        if played is not None:
            game.spent_s, wall_s = played.clock_s, played.wall_s
        episode = await game.played(lambda: self._run(game))
        wall_s += episode.seconds
        if self._saved is None or episode.failure is not None:
            again = {PLAYED_AGAIN: self._times_again} if self._times_again else {}
            return replace(episode, counts={**episode.counts, **again}, seconds=wall_s)
        part = self._saved.played
        part = None if part is None else replace(part, wall_s=wall_s)
        return replace(self._saved, played=part)

    async def begin(self, game: Game) -> Mapping[str, Observation]:
        """Reset, and be as far as the saved episode."""
        observations, played = await game.reset(), self._played
        self._agents = _resumable(game)
        if played is None:
            return observations
        async with stage("load_state", game.world.limits.reset_timeout_s):
            await call_load_state(game.world, played.world)
            trajectories = [saved.restored() for saved in played.trajectories]
            for name, agent in self._agents.items():
                own = [saved for saved in (*trajectories, *played.unrecorded) if saved.agent == name]
                agent.load_state(played.agents[name], own, game.world.tools_of(name))
        record = game.record
        record.trajectories = [(s.agent, s.reason, list(s.turns)) for s in trajectories]
        self._num_turns, self._num_steps = [len(s.turns) for s in trajectories], len(played.step_rewards)
        record.rewards = list(played.step_rewards)
        record.counts.update(played.counts)
        record.usage = played.usage
        game.turns.update(s.agent for s in played.trajectories for _ in s.turns)
        self._acts = dict(played.acts)
        return played.observations

    async def before_turns(self, game: Game) -> None:
        """Pass on what was played; stop between two turns, where that is requested."""
        if self._on_step is not None and len(game.record.rewards) > self._num_steps:
            await self._pass_on(game, self._on_step)
        if self._episodes.is_stopping:
            raise _EpisodeStoppedError(game.episode_id)

    async def turn(self, game: Game, name: str, observation: Observation) -> Act:
        """The agent's turn, or the saved one; where it is stopped, an empty one that is not recorded."""
        if name in self._acts:
            return self._acts.pop(name)
        if (agent := self._agents.get(name)) is None:
            return await game.act(name, observation)
        try:
            with self._episodes.stopping(partial(agent.stop, session_id_of(game.episode_id, name))):
                return await game.act(name, observation)
        except StageError as error:
            if not isinstance(error.__cause__, TurnStoppedError):
                raise
        self._stopped.add(name)
        return Act(Message("assistant"), None)

    async def whole(self, game: Game, world: PlaysItself) -> Ending | None:
        """Where it is stopped, it begins again: its world saves no state in the middle."""
        if self._episodes.is_stopping:
            raise _EpisodeStoppedError(game.episode_id)
        with ExitStack() as stack:
            for name, agent in _resumable(game).items():
                stop = partial(agent.stop, session_id_of(game.episode_id, name))
                stack.enter_context(self._episodes.stopping(stop))
            ending = await world.play_game(game)
        if ending is Ending.ABORTED and self._episodes.is_stopping:
            raise _EpisodeStoppedError(game.episode_id)
        return ending

    def after_turns(
        self, game: Game, observations: Mapping[str, Observation], acts: Mapping[str, Act]
    ) -> None:
        """Stop where an agent was stopped in its turn; the turns of others are saved."""
        if self._stopped:
            self._acts = {name: act for name, act in acts.items() if name not in self._stopped}
            game.unseen.update(observations)
            raise _EpisodeStoppedError(game.episode_id)

    async def _run(self, game: Game) -> Ending:
        try:
            return await game.run()
        except _EpisodeStoppedError:
            self._saved = await self._save(game)
            return Ending.ABORTED

    async def _pass_on(self, game: Game, on_step: OnStep) -> None:
        saved = await self._save(game, self._num_turns, self._num_steps)
        if saved.played is None:
            # What was not saved once is not tried again: that may take seconds each time.
            self._on_step = None
            return
        on_step(self._num_steps, saved)
        self._num_turns = [len(turns) for _, _, turns in game.record.trajectories]
        self._num_steps = len(game.record.rewards)

    async def _save(self, game: Game, num_turns: Sequence[int] = (), num_steps: int = 0) -> EpisodeInProgress:
        """The episode, without the first turns of its trajectories, and the first steps (counts)."""
        played = None
        # `agentrl check` reports what cannot be saved. Here the episode begins again.
        with suppress(StageError):
            async with stage("save_state", _SAVE_TIMEOUT_S):
                played = await self._played_by(game, num_turns, num_steps)
        ids = (game.episode_id, game.world.id, game.task, game.seed, game.sampling_seed)
        return EpisodeInProgress(*ids, played, self._times_again)

    async def _played_by(self, game: Game, num_turns: Sequence[int], num_steps: int) -> SavedPlay | None:
        """What was played since; None = the world or an agent cannot save its state."""
        record = game.record
        world = await call_save_state(game.world)
        if world is None or len(self._agents) < len(game.players):
            return None
        since = dict(enumerate(num_turns))
        return SavedPlay(
            world,
            {name: agent.save_state(game.world.tools_of(name)) for name, agent in self._agents.items()},
            tuple(SavedTurns.of(*each, since.get(i, 0)) for i, each in enumerate(record.trajectories)),
            tuple(record.rewards[num_steps:]),
            unseen={name: tuple(messages) for name, messages in game.unseen.items()},
            rewritten={n: seen.reason for n, seen in game.unseen.items() if isinstance(seen, History)},
            acts={name: act._replace(counts=dict(act.counts)) for name, act in self._acts.items()},
            counts=dict(record.counts),
            usage=record.usage,
            clock_s=game.spent_s + game.running.seconds,
        )


def _resumable(game: Game) -> dict[str, ResumableAgent]:
    return {name: each for name, each in game.players.items() if isinstance(each, ResumableAgent)}


class StoppableEpisodes:
    """Plays any number of episodes, which all stop at once.

    Each stops at its next boundary of turns, or of tokens in a turn; a step of a world that is under way ends
    first. What is played is passed on, turn by turn, where a call has `on_step`, unless the world or an agent
    saves no state.
    """

    def __init__(self) -> None:
        self.is_stopping = False
        self._turns: dict[int, Callable[[], Awaitable[None]]] = {}
        self._number = 0

    async def play(
        self,
        env: AnyEnvironment,
        agents: Agent | Mapping[str, Agent],
        task: Task,
        *,
        seed: int = 0,
        episode_id: str = "",
        sampling_seed: int = 0,
    ) -> Episode | EpisodeInProgress:
        """Play as `agentrl.play` does, until the episode ends or is stopped.

        The environment and the agents are closed in both cases. An episode that fails while it is stopped is
        an Episode that has failed.

        Raises:
            UserError: an agent of the environment has no player, or an invalid name.
        """
        return await self.played(Game.of(env, agents, task, seed, episode_id, sampling_seed))

    async def resume(
        self, env: AnyEnvironment, agents: Agent | Mapping[str, Agent], saved: EpisodeInProgress
    ) -> Episode | EpisodeInProgress:
        """Go on with an episode, in a new instance and with new agents.

        Every token has the logprob and the version that it was sampled with; the episode's deadline has what
        was left of it. An episode that has to begin again is counted (`played_again`).

        Raises:
            UserError: the environment is another one, or has other agents.
        """
        game = Game.of(env, agents, saved.task, saved.seed, saved.id, saved.sampling_seed)
        return await self.played(game, saved)

    async def played(
        self, game: Game, saved: EpisodeInProgress | None = None, on_step: OnStep | None = None
    ) -> Episode | EpisodeInProgress:
        """Play an episode that has not begun, or go on with what was saved of it; see `play` and `resume`.

        Raises:
            UserError: as for `resume`.
        """
        if saved is not None and game.world.id != saved.env_id:
            raise UserError(
                f"episode {saved.id} was played in {saved.env_id}, not in {game.world.id}; name that one."
            )
        return await _Resumable(self, saved, on_step).played(game)

    async def stop(self) -> None:
        """Stop all episodes; those that begin later stop before their first turn."""
        self.is_stopping = True
        await asyncio.gather(*(stop() for stop in tuple(self._turns.values())))

    @contextmanager
    def stopping(self, stop: Callable[[], Awaitable[None]]) -> Iterator[None]:
        """A turn, which `stop` ends."""
        self._number += 1
        number = self._number
        self._turns[number] = stop
        try:
            yield
        finally:
            del self._turns[number]
