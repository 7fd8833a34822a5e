"""An episode that is driven from outside is the one that `play` plays with the same actions."""

from __future__ import annotations

import asyncio

import pytest

from agentrl import Env, Message, ScriptedAgent, Task, make, play, say
from agentrl.envs import score
from agentrl.envs.export.driven import DrivenEpisode
from agentrl.errors import StageError
from agentrl.types import Finish


async def driven(env, task, script, seed=0):
    """Its observations and its verdict, with the actions of a script."""
    episode = DrivenEpisode(env, task, seed=seed)
    seen = [await episode.begin()]
    action = next(script)
    while (observation := await episode.act(action)) is not None:
        seen.append(observation)
        action = script.send("\n".join(message.text for message in observation))
    return seen, await episode.end()


@pytest.mark.parametrize("env_id", ["HopSearch-v0", "Wordle-v0", "Calculator-v0"])
async def test_what_is_seen_and_scored_is_that_of_play(env_id):
    env = make(env_id)
    for task in env.tasks("test")[:3]:
        episode = await play(make(env_id), ScriptedAgent(env.expert(task)), task)
        expected = (await score([episode], env.rewards)).verdicts[0]
        seen, verdict = await driven(make(env_id), task, env.expert(task))
        assert seen == [turn.observation for turn in episode.turns]
        assert (verdict.total, verdict.parts) == (1.0, expected.parts)


async def test_the_limit_of_turns_ends_it_and_later_actions_do_nothing():
    env = make("Wordle-v0")
    episode = DrivenEpisode(env, env.tasks("test")[0], seed=0)
    await episode.begin()
    answered = [await episode.act(say("zzzzz")) for _ in range(8)]
    assert [observation is None for observation in answered] == [False] * 5 + [True] * 3
    assert (await episode.end()).total == 0.0


class Paying(Env):
    """Pays half a point a turn, and tells whether it is closed."""

    is_closed = False
    fails_at = ""

    def __init__(self):
        super().__init__()
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()

    def tasks(self, split):
        return [Task.ask("one", "Go on.")]

    async def reset(self, task, *, seed):
        if self.fails_at == "reset":
            raise OSError("no world")
        return task.prompt, {}

    async def step(self, action):
        if self.fails_at == action.text:
            raise OSError("the world is gone")
        if action.text == "wait":
            self.begun.set()
            await self.goes_on.wait()
        return (Message("user", "And?"),), 0.5, False, False, {}

    async def close(self):
        self.is_closed = True


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
async def test_one_that_is_cut_is_scored_as_it_is_and_closed(finish):
    env = Paying()
    episode = DrivenEpisode(env, env.tasks("train")[0], seed=0)
    await episode.begin()
    await episode.act(say("a"))
    await episode.act(say("b"), finish)
    assert (await episode.end()).total == (1.0 if finish is Finish.STOP else 0.5)
    assert env.is_closed


async def test_one_whose_driver_has_left_in_the_middle_of_a_step_ends():
    env = Paying()
    episode = DrivenEpisode(env, env.tasks("train")[0], seed=0)
    await episode.begin()
    acting = asyncio.create_task(episode.act(say("wait")))
    await env.begun.wait()
    acting.cancel()
    ending = asyncio.create_task(episode.end())
    await asyncio.sleep(0)
    env.goes_on.set()
    assert (await asyncio.wait_for(ending, 20)).total == 0.5
    assert env.is_closed


@pytest.mark.parametrize("fails_at", ["reset", "b"])
async def test_a_failure_of_the_world_is_raised_wherever_one_looks(fails_at):
    env = Paying()
    env.fails_at = fails_at
    episode = DrivenEpisode(env, env.tasks("train")[0], seed=0)
    if fails_at != "reset":
        await episode.begin()
        await episode.act(say("a"))
    with pytest.raises(StageError, match="world"):
        await (episode.begin() if fails_at == "reset" else episode.act(say(fails_at)))
    with pytest.raises(StageError, match="world"):
        await episode.end()
    assert env.is_closed
