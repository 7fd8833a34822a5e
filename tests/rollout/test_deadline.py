"""A group's deadline: a straggler ends at its turn, truncated, and its group is complete."""

from __future__ import annotations

import asyncio

import pytest

from agentrl import Message, say
from agentrl.data import Prompt
from agentrl.envs import Scorer
from agentrl.protocols import Act
from agentrl.rollout.agent import DeadlineAgent
from agentrl.rollout.group import GroupPlayer
from agentrl.types import Ending, Finish, Step
from tests.worlds import ASK, Speaker, Talk, raising, turn_tokens

PROMPT = Prompt(7, ASK, 1234)
MINUTE = 60.0


class Straggler(Speaker):
    """Ends its first turn, and never the second."""

    async def act(self, observation, *, tools, session):
        if self.sessions:
            await asyncio.Event().wait()
        return await super().act(observation, tools=tools, session=session)


def two_turns():
    return Talk(steps=[Step.going(Message("tool", "go on")), Step.finished(reward=1.0)])


def speaker(kind=Speaker):
    return kind(say("a"), say("b"), tokens=[turn_tokens(2, 1, Finish.STOP), turn_tokens(2, 1, Finish.STOP)])


def player(*agents, env=two_turns, timeout_s=0.05, retries=2):
    waiting = list(agents)
    return GroupPlayer(env, lambda: waiting.pop(0), Scorer(), 2, retries, 0, timeout_s=timeout_s)


async def test_a_straggler_keeps_its_turns_and_does_not_hold_up_its_sibling():
    straggler = speaker(Straggler)
    outcome = await asyncio.wait_for(player(speaker(), straggler).play(PROMPT, 0), MINUTE)
    first, second = outcome.group.episodes
    assert (first.ending, second.ending) == (Ending.COMPLETED, Ending.TRUNCATED)
    assert [verdict.total for verdict in outcome.group.verdicts] == [1.0, 0.0]
    turns = second.trajectories[0].turns
    assert [len(turn.tokens.completion.token_ids) for turn in turns] == [1, 0]
    assert turns[-1].tokens.completion.finish is Finish.LENGTH
    assert straggler.closed


async def test_without_a_deadline_a_straggler_is_waited_for():
    group = asyncio.create_task(player(speaker(), speaker(Straggler), timeout_s=float("inf")).play(PROMPT, 0))
    done, _ = await asyncio.wait([group], timeout=0.2)
    group.cancel()
    assert not done


async def test_no_episode_is_played_again_after_the_deadline():
    worlds = []

    def failing():
        worlds.append(Talk({"reset": raising(RuntimeError("no world"))}))
        return worlds[-1]

    agents = [speaker() for _ in range(6)]
    late = await player(*agents, env=failing, timeout_s=1e-9).play(PROMPT, 0)
    assert late.group is None
    assert len(worlds) == len(late.failed) == 2
    await player(*agents, env=failing, timeout_s=MINUTE, retries=1).play(PROMPT, 0)
    assert len(worlds) == 2 + 4


async def test_an_agents_own_timeout_is_no_deadline():
    class Overdue(Speaker):
        async def act(self, observation, *, tools, session):
            raise TimeoutError("the server took too long")

    loop = asyncio.get_running_loop()
    agent = DeadlineAgent(Overdue(), loop.time() + MINUTE)
    with pytest.raises(TimeoutError, match="the server took too long"):
        await agent.act((), tools=(), session=None)
    ended = await DeadlineAgent(Straggler(say("a")), loop.time() - 1).act((), tools=(), session=None)
    assert isinstance(ended, Act)
