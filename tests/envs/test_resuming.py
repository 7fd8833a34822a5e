"""An episode that was stopped at random places is, token for token, the one that was not."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings

from agentrl import JointStep, Limits, Message, MultiAgentEnv, Step, Task, ToolEnv, make, play, say
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.envs.boundary import STATE_CHARS, as_multi_agent, call_save_state
from agentrl.envs.resuming import PLAYED_AGAIN, EpisodeInProgress, SavedPlay, SavedTurns, StoppableEpisodes
from agentrl.errors import StageError, UserError
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.types import Episode, Finish, ToolCall
from agentrl.types.seams import Act, Stops
from tests.laws.test_on_policy import Bytes, model_of
from tests.records.episodes import episodes
from tests.records.test_episode_json import assert_same
from tests.worlds import FOREVER_S, Parrot

LIMITS = Limits(max_turns=4, max_tokens=150)
TASK = Task("t", (Message("user", "abcdef"),))


class Letters(ToolEnv):
    """Counts its calls, draws letters, and has a tool: all that belongs to an episode."""

    id = "Letters-v0"
    limits = LIMITS

    def __init__(self):
        super().__init__()
        self.drawn = []

    def echo(self, text: str) -> str:
        """Say it again, with a letter by chance."""
        self.counts["echoes"] += 1
        self.drawn.append(self.rng.randrange(26))
        return text + chr(97 + self.drawn[-1]) * len(self.drawn)

    tools = (echo,)

    def tasks(self, split):
        return [TASK]

    def reward(self, task, answer):
        return 0.0

    def save_state(self):
        return {"drawn": list(self.drawn)}


class Duet(MultiAgentEnv):
    """Two agents act at the same time, then the first alone."""

    id = "Duet-v0"
    possible_agents = ("one", "two")
    limits = LIMITS

    def tasks(self, split):
        return [TASK]

    async def reset(self, task, *, seed):
        self.acting, self.number = ("one", "two"), 0
        return {"one": task.prompt, "two": task.prompt}, {}

    async def step(self, actions):
        self.number += 1
        self.acting = ("one", "two") if self.number % 2 == 0 else ("one",)
        said = (Message("user", "".join(sorted(actions)) * self.number),)
        return JointStep.going({"one": said, "two": said}, {"one": float(self.number)})

    def save_state(self):
        return {"number": self.number}


class Forgetting(Letters):
    """Cannot save its state."""

    def save_state(self):
        return None


class Rare(Bytes):
    """A turn ends with one of three tokens, so most take dozens."""

    def stops(self, tools):
        return Stops((), (0, 1, 2))


@cache
def engine_of():
    return EmbeddedEngine.from_model(model_of("qwen3"), max_slots=4)


def players(env, temperature):
    settings = SamplingSettings(temperature=temperature, max_response_len=60)
    return {name: TokenAgent(engine_of(), Rare(), settings) for name in env.possible_agents}


def record_of(episode):
    """All of an episode but times, logprobs, and what the cache held."""
    assert isinstance(episode, Episode)
    turns = [
        (
            trajectory.agent,
            turn.observation,
            repr(turn.action),
            turn.tokens.world_ids.tolist(),
            turn.tokens.prompt_crc32,
            turn.tokens.completion.token_ids.tolist(),
            turn.tokens.completion.versions.tolist(),
            turn.tokens.completion.finish,
            turn.step,
        )
        for trajectory in episode.trajectories
        for turn in trajectory.turns
    ]
    return turns, episode.step_rewards, dict(episode.events), episode.ending, episode.agents


def logprobs_of(episode):
    turns = [turn for trajectory in episode.trajectories for turn in trajectory.turns]
    return np.concatenate([turn.tokens.completion.logprobs for turn in turns])


async def stopped_after(number, playing, episodes):
    """The result of an episode that is stopped after so many iterations of the event loop."""
    task = asyncio.create_task(playing)
    for _ in range(number):
        await asyncio.sleep(0)
    await episodes.stop()
    return await task


async def in_pieces(env_class, temperature, rng, seed):
    """Play with stops at random places, each piece from the JSON of the one before; how many there were."""
    saved, pieces = None, 0
    while True:
        env, episodes = env_class(), StoppableEpisodes()
        agents = players(env, temperature)
        playing = (
            episodes.play(env, agents, TASK, seed=3, sampling_seed=seed)
            if saved is None
            else episodes.resume(env, agents, saved)
        )
        result = await stopped_after(rng.randrange(4, 24), playing, episodes)
        if isinstance(result, Episode):
            return result, pieces
        pieces += 1
        saved = EpisodeInProgress.of_json(json.loads(json.dumps(result.to_json())))


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "seeded"])
@pytest.mark.parametrize("env_class", [Letters, Duet])
async def test_an_episode_with_stops_at_random_places_is_the_one_without(env_class, temperature):
    rng, stops = random.Random(f"{env_class.id}/{temperature}"), []
    for seed in range(2):
        env = env_class()
        expected = await play(env, players(env, temperature), TASK, seed=3, sampling_seed=seed)
        episode, pieces = await in_pieces(env_class, temperature, rng, seed)
        assert record_of(episode) == record_of(expected)
        assert np.allclose(logprobs_of(episode), logprobs_of(expected), rtol=0, atol=1e-4)
        stops.append(pieces)
    assert sum(stops) > 2


async def test_a_stop_in_a_turn_keeps_its_tokens_with_their_version():
    engine = EmbeddedEngine.from_model(model_of("qwen3"), max_slots=4)
    settings = SamplingSettings(max_response_len=100)

    class Endless(Bytes):
        def stops(self, tools):
            return super().stops(tools)._replace(token_ids=())

    env, episodes = Letters(), StoppableEpisodes()
    agent = TokenAgent(engine, Endless(), settings)
    saved = await stopped_after(40, episodes.play(env, agent, TASK, sampling_seed=1), episodes)
    assert isinstance(saved, EpisodeInProgress)
    (state,) = saved.played.agents.values()
    begun = state[1][2]["token_ids"]
    assert 0 < len(begun) < 100
    assert saved.played.trajectories == ()
    engine.memory.rename(1)
    agent = TokenAgent(engine, Endless(), settings)
    episode = await StoppableEpisodes().resume(Letters(), agent, saved)
    (turn,) = episode.turns[:1]
    completion = turn.tokens.completion
    assert completion.token_ids.tolist()[: len(begun)] == begun
    assert completion.versions.tolist() == [0] * len(begun) + [1] * (100 - len(begun))
    assert completion.finish is Finish.LENGTH
    await engine.close()


async def stopped_at_once(env):
    """The episode, stopped before its first turn."""
    episodes = StoppableEpisodes()
    await episodes.stop()
    return await episodes.play(env, players(env, 1.0), TASK, seed=3, sampling_seed=1)


async def test_an_environment_that_cannot_save_its_state_plays_again_and_that_is_counted():
    env = Forgetting()
    expected = await play(env, players(env, 1.0), TASK, seed=3, sampling_seed=1)
    saved = await stopped_at_once(Forgetting())
    assert (saved.played, saved.times_again) == (None, 0)
    env, episodes = Forgetting(), StoppableEpisodes()
    await episodes.stop()
    saved = await episodes.resume(env, players(env, 1.0), saved)
    assert (saved.played, saved.times_again) == (None, 1)
    env = Forgetting()
    episode = await StoppableEpisodes().resume(env, players(env, 1.0), saved)
    assert episode.counts[PLAYED_AGAIN] == 2
    turns, rewards, events, *rest = record_of(episode)
    assert (turns, rewards, {k: n for k, n in events.items() if k != PLAYED_AGAIN}, *rest) == record_of(
        expected
    )


async def test_the_deadline_of_an_episode_has_what_was_left_of_it():
    class Slow(Letters):
        limits = Limits(max_turns=4, max_tokens=120, episode_timeout_s=60.0)

        async def step(self, action):
            await asyncio.sleep(FOREVER_S)
            return Step.going(Message("user", "go on"))

    saved = await stopped_at_once(Slow())
    assert saved.played.clock_s > 0
    assert saved.played.wall_s > 0
    late = replace(saved, played=replace(saved.played, clock_s=59.9, wall_s=70.0))
    env = Slow()
    episode = await StoppableEpisodes().resume(env, players(env, 0.0), late)
    assert episode.failure.name == "episode_timeout"
    assert 70 < episode.seconds < 70 + FOREVER_S


async def test_a_state_that_is_too_large_or_no_json_costs_the_beginning_of_the_episode_and_no_more():
    class Huge(Letters):
        def save_state(self):
            return {"text": "x" * STATE_CHARS}

    class Odd(Letters):
        def save_state(self):
            return {"drawn": {1, 2}}

    for env_class, sentence in ((Huge, "save what steps change, and build the rest"), (Odd, "plain values")):
        assert (await stopped_at_once(env_class())).played is None
        with pytest.raises(StageError, match=sentence):
            await call_save_state(as_multi_agent(env_class()))


async def test_another_environment_is_refused_in_a_sentence():
    env = Letters()
    saved = await stopped_at_once(env)
    assert saved.played.step_rewards == ()
    with pytest.raises(UserError, match=r"played in Letters-v0, not in Parrot-v0; name that one"):
        await StoppableEpisodes().resume(Parrot(), players(env, 0.0), saved)


async def test_scripts_play_again_from_the_beginning():
    class Script:
        async def act(self, observation, *, tools, session):
            await asyncio.sleep(0)
            return Act(say("x"), None)

        async def close(self, session_id):
            pass

    episodes = StoppableEpisodes()
    await episodes.stop()
    saved = await episodes.play(Letters(), Script(), TASK)
    assert saved.played is None


@pytest.mark.parametrize(
    "env_id",
    ["Wordle-v0", "Calculator-v0", "HopSearch-v0", "RockPaperScissors-v0", "SolverCritic-v0", "Sokoban-v0"],
)
def test_shipped_environments_of_plain_state_save_it(env_id):
    assert make(env_id).save_state() is not None


@given(episodes())
@settings(deadline=None)
def test_what_was_played_comes_back_as_it_was_whatever_a_model_wrote(episode):
    turns = tuple(SavedTurns(each.agent, None, each.turns) for each in episode.trajectories)
    call = ToolCall("add", {"\ud800": 1})
    message = Message("assistant", tool_calls=(call,))
    acts = {"agent": Act(message, None)}
    played = SavedPlay({}, {}, turns, (), {}, {}, acts, {}, None, 0.0)
    saved = EpisodeInProgress("e", "Sums-v0", replace(episode.task, metadata={"\udfff": "x"}), 1, 2, played)
    again = EpisodeInProgress.of_json(json.loads(json.dumps(saved.to_json())))
    assert_same(again.task, saved.task)
    assert again.played.acts["agent"].message == message
    for ours, expected in zip(again.played.trajectories, turns, strict=True):
        assert_same(ours.turns, expected.turns)
