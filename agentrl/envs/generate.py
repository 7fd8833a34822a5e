"""Episodes that a custom generate function plays: turns and steps in its own order, recorded as `play` does.

async def second_look(episode):
    await episode.reset()
    while not episode.is_over:
        action = await episode.act()
        if not action.tool_calls:
            action = await episode.act(Message("user", "Check your answer, and give it again."))
        await episode.step(action)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from agentrl.envs.own_tokens import OwnTokens
from agentrl.envs.play import Game, PlayEpisode, check_names, ending_of, is_name
from agentrl.errors import AgentRLError, StageError, UserError
from agentrl.runtime.stage import stage
from agentrl.types import (
    Ending,
    Episode,
    Limits,
    Message,
    Observation,
    Restart,
    RewardParts,
    StepReward,
    Task,
    quoted,
)
from agentrl.types.seams import Act, Agent, MultiAgentEnvironment, SingleAgentEnvironment


class EpisodeEndedError(AgentRLError):
    """The episode has ended: there are no more turns and steps. A generate function need not catch it."""


class EpisodeInPlay:
    """An episode of an environment with one agent, driven by a generate function.

    The function calls `reset` once, then `act` and `step`. It never makes tokens: each turn is one of the
    agent's, as it was recorded when it was sampled. Limits and deadlines hold. The episode ends when the
    world ends it or a turn is unfinished; after `limits.max_turns`, or the function's return, truncated.

    One that writes its prompts itself calls `tokens.sample` and `keep` in place of `act`. It ends the episode
    with a `step`, which the environment rewards, or with `finish`, and a reward of its own. It may also play
    several agents by one policy, each with trajectories and a reward of its own.
    """

    def __init__(self, game: Game) -> None:
        self._game = game
        (self._name,) = game.players
        self.tokens = OwnTokens(game)
        self._ending: Ending | None = None
        self._has_news = self._is_step_due = self._has_kept = False

    @property
    def task(self) -> Task:
        """The task."""
        return self._game.task

    @property
    def id(self) -> str:
        """The name of the episode in the journal."""
        return self._game.episode_id

    @property
    def seed(self) -> int:
        """A seed that depends on the episode's id and its world's seed: the same when it is replayed."""
        return zlib.crc32(f"generate/{self._game.seed}/{self._game.episode_id}".encode())

    @property
    def limits(self) -> Limits:
        """Those of the environment."""
        return self._game.world.limits

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._ending is not None

    async def reset(self) -> Observation:
        """Begin the episode; the first prompt, which the agent sees at its next turn."""
        return self._deliver(await self._game.reset())

    async def act(self, *added: Message) -> Message:
        """The agent's next turn: on what the world showed since its last one, then on `added` messages.

        These are the world's tokens, as every message that the policy did not sample.

        Raises:
            EpisodeEndedError: the turn is unfinished, or there may be no more turns.
            StageError: the agent failed, or there is nothing new to act on.
        """
        self._check_running()
        if self._has_kept:
            raise _mixed()
        if not (self._has_news or added):
            raise StageError("generate", "invalid", "act() needs a reset(), a step() or a message to act on")
        if self._game.turns[self._name] == self.limits.max_turns:
            self._end(Ending.TRUNCATED)
        if self._is_step_due:
            # Rewards and turns stay in step: the world did not see the last turn.
            self._game.record.rewards.append(None)
        if added:
            self._game.deliver({self._name: added})
        acts = await self._game.acts([self._name], self._game.turns[self._name])
        self._has_news, self._is_step_due = False, True
        unfinished = ending_of(acts)
        if unfinished is not None:
            self._end(unfinished)
        return acts[self._name].message

    async def step(self, action: Message) -> Observation:
        """Pass an action to the world; what it shows, which the agent sees at its next turn.

        The reward of the step is credited to the agent's last turn.

        Raises:
            EpisodeEndedError: the episode had ended before.
            StageError: the environment failed, or the agent has not acted since the last step.
        """
        self._check_running()
        if self.tokens.was_aborted:
            self._end(Ending.ABORTED)
        if not self._is_step_due:
            raise StageError("generate", "invalid", "step() needs an act() before it")
        step = await self._game.step({self._name: action})
        self._is_step_due = False
        if step.terminated or step.truncated:
            self._ending = Ending.COMPLETED if step.terminated else Ending.TRUNCATED
            return step.observations.get(self._name, ())
        return self._deliver(step.observations)

    def keep(
        self,
        ids: Sequence[int],
        trained: Sequence[bool],
        *,
        agent: str | None = None,
        reason: Restart = Restart.REWRITTEN,
    ) -> None:
        """Make turns of tokens: those of the world, and those that `tokens.sample` returned after them.

        Called again, it begins another trajectory of that agent. A token is trained once: in later
        trajectories it is the world's.

        Args:
            ids: int [T], a whole trajectory, the prompt first. trained: bool [T].
            agent: whose trajectory it is; None = the environment's agent's. Any other name is another agent
                of this episode, which is compared with the one of its name in each sibling.
            reason: why it does not continue the agent's trajectory before; the first has none.

        Raises:
            EpisodeEndedError: the episode had ended before.
            StageError: a trained token is not one that the policy sampled in this place, or no agent can
                have that name.
        """
        self._check_running()
        turned = self._game.turns
        if turned.total() and not self._has_kept:
            raise _mixed()
        name = self._name if agent is None else agent
        if not is_name(name):
            raise StageError("generate", "invalid", f"an agent cannot be called {quoted(name)}")
        self._has_kept = True
        restart = reason if turned[name] else None
        for turn in self.tokens.turns_of(ids, trained, turned.total()):
            if self._is_step_due:
                self._game.record.rewards.append(None)
            self._game.record.add(name, turn, Act(turn.action, turn.tokens, restart))
            turned[name] += 1
            self._has_news, self._is_step_due, restart = False, True, None

    def finish(self, reward: StepReward, *, truncated: bool = False) -> None:
        """End the episode with a reward of the function's own, which the environment does not see.

        reward: of the last turn; a number, or `RewardParts`, for each agent, or by the agent's name; None =
            it has no score.
        truncated: whether a limit ended it.

        Raises:
            EpisodeEndedError: the episode had ended before.
            StageError: a reward is not finite, or of no agent; or there was no turn since the last step.
        """
        self._check_running()
        if self.tokens.was_aborted:
            self._end(Ending.ABORTED)
        if not self._is_step_due:
            raise StageError("generate", "invalid", "finish() needs a turn before it; call act() or keep()")
        if isinstance(reward, Mapping):
            check_names(reward, self._game.agents)
            reward = {name: _number(own) for name, own in reward.items()}
        else:
            reward = _number(reward)
        self._game.record.rewards.append(reward)
        self._is_step_due = False
        self._ending = Ending.TRUNCATED if truncated else Ending.COMPLETED

    def copied(self) -> EpisodeInPlay:
        """What was sampled so far, of which nothing is kept yet; this one goes on untouched."""
        copy = EpisodeInPlay(self._game.anew())
        copy.tokens = self.tokens.copied()
        return copy

    def cut(self) -> Episode:
        """End it here, without a reward; it raises what `finish` does."""
        self.finish(None, truncated=True)
        return self._game.episode(Ending.TRUNCATED, None, 0.0)

    async def run(self, generate: Generate) -> Ending:
        """Play by a generate function until it returns or the episode has ended.

        Raises:
            StageError: the function raised, or returned before the agent had a turn.
        """
        async with stage("generate", None):
            with suppress(EpisodeEndedError):
                await generate(self)
        if self._ending is None and self.tokens.was_aborted:
            return Ending.ABORTED
        if not self._game.turns.total() and self._ending is None:
            raise StageError("generate", "invalid", "it returned without a turn; call reset(), then act()")
        return self._ending or Ending.TRUNCATED

    def _deliver(self, observations: Mapping[str, Observation]) -> Observation:
        self._game.deliver(observations)
        self._has_news = True
        return observations.get(self._name, ())

    def _check_running(self) -> None:
        if self._ending is not None:
            raise EpisodeEndedError(f"the episode has ended: {self._ending}")

    def _end(self, ending: Ending) -> None:
        self._ending = ending
        self._check_running()


def _number(reward: float | None) -> float | None:
    if reward is not None and not math.isfinite(reward):
        raise StageError("reward", "invalid", f"the reward must be a finite number, got {reward!r}")
    return reward if isinstance(reward, RewardParts | None) else float(reward)


def _mixed() -> StageError:
    return StageError("generate", "invalid", "an episode is played by act(), or by keep(), not by both")


GENERATE_KEY = "generate_function_path"
"""In the metadata of a task: the path of the generate function that plays it."""

Generate: TypeAlias = Callable[[EpisodeInPlay], Awaitable[None]]
"""Plays one episode in its own way."""


def generating(generate: Generate) -> PlayEpisode:
    """A function that plays as `play` does, by a generate function. Where that fails, the episode fails.

    Raises (when it plays):
        UserError: the environment has several agents, or plays its episodes by itself.
    """

    async def play_generated(
        env: SingleAgentEnvironment | MultiAgentEnvironment,
        agents: Agent | Mapping[str, Agent],
        task: Task,
        *,
        seed: int = 0,
        episode_id: str = "",
        sampling_seed: int = 0,
    ) -> Episode:
        game = Game.of(env, agents, task, seed, episode_id, sampling_seed)
        if len(game.players) > 1:
            raise UserError(
                f"{env.id} has several agents, and a generate function plays one; leave out "
                "custom_generate_function_path."
            )
        if game.own is not None:
            raise UserError(
                f"{env.id} plays its episodes by itself; leave out custom_generate_function_path."
            )
        episode = EpisodeInPlay(game)
        return await game.played(lambda: episode.run(generate))

    return play_generated


def by_task(play: PlayEpisode, named: Mapping[str, PlayEpisode]) -> PlayEpisode:
    """A function that plays the tasks whose metadata name one by what has that name, others by `play`.

    Raises (when it plays):
        UserError: a task names another one.
    """

    async def play_named(
        env: SingleAgentEnvironment | MultiAgentEnvironment,
        agents: Agent | Mapping[str, Agent],
        task: Task,
        *,
        seed: int = 0,
        episode_id: str = "",
        sampling_seed: int = 0,
    ) -> Episode:
        path = task.metadata.get(GENERATE_KEY)
        plays = play if path is None else named.get(path) if isinstance(path, str) else None
        if plays is None:
            raise UserError(
                f"the task `{task.id}` asks for the generate function {quoted(path)}; name it in "
                "generate_function_paths, or leave it out of the prompt's metadata."
            )
        return await plays(env, agents, task, seed=seed, episode_id=episode_id, sampling_seed=sampling_seed)

    return play_named
