"""A reward of one's own in an environment that has rewards: in place of these, or beside them."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest

from agentrl import Reward, ScriptedAgent, Task, ToolEnv, call, play, say
from agentrl.assembly.rewards import build_scorer
from agentrl.envs.config import RewardChoice
from agentrl.envs.scoring import Scorer, of_last_answers
from agentrl.errors import UserError
from agentrl.types import Ending
from envs_contrib.tic_tac_toe import TicTacToe

TASK = Task.ask("t", "Where?", "Torek")


def turns(episode):
    return float(len(episode.turns))


class Asks(ToolEnv):
    """Two turns: a call, and an answer that is worth 0.25."""

    rewards = (Reward(turns, weight=0.5),)

    async def look(self) -> str:
        """Look."""
        return "nothing"

    tools = (look,)

    def tasks(self, split):
        return [TASK]

    def reward(self, task, answer):
        return 0.25

    def expert(self, task):
        yield say((yield call("look")) and task.answer)


def played(env=None):
    env = env or Asks()
    return asyncio.run(play(env, ScriptedAgent(env.expert(TASK)), TASK))


def verdict(scorer, episode):
    return asyncio.run(scorer.judge([asyncio.run(scorer.mark(episode))]))[0]


def label(task, answer):
    return {"score": 2.0 * (answer == task.answer), "read": answer}


async def slow_label(task, answer):
    await asyncio.sleep(0.01)
    return label(task, answer)


def scorer_of(weight, reward="label"):
    choice = RewardChoice(reward=f"{__name__}:{reward}", env_reward_weight=weight)
    return asyncio.run(build_scorer(choice, Asks, TASK))


@pytest.mark.parametrize("reward", ["label", "slow_label"])
@pytest.mark.parametrize(("weight", "total"), [(0.0, 2.0), (1.0, 0.25 + 0.5 * 2 + 2.0), (-2.0, -2.5 + 2.0)])
def test_the_own_rewards_count_by_their_weight(weight, total, reward):
    found = verdict(scorer_of(weight, reward), played())
    assert found.total == total
    assert found.parts == {"env": 0.25, "turns": 2.0, reward: 2.0}
    assert found.turn_rewards == (None, 0.25 * weight)


def test_an_episode_that_a_limit_ended_has_no_answer():
    cut = replace(played(), ending=Ending.TRUNCATED)
    assert verdict(scorer_of(0.0), cut).parts["label"] == 0.0


def test_each_agent_is_graded_by_its_own_last_answer():
    env = TicTacToe()
    task = env.tasks("train")[0]
    agents = {name: env.scripted(task, name, random.Random(0)) for name in env.possible_agents}
    episode = asyncio.run(play(env, agents, task))
    scorer = Scorer((of_last_answers(lambda _, answer: float(len(answer)), "size"),), step_weight=0.0)
    found = asyncio.run(scorer.judge([asyncio.run(scorer.mark(episode))]))
    for own in found:
        action = episode.turns_of(own.agent)[-1].action
        assert own.total == len(action.text + "".join(c.raw for c in action.tool_calls)) > 0


def test_a_function_that_blocks_holds_nobody_up_and_one_that_fails_fails_the_episode():
    def blocks(task, answer):
        time.sleep(0.3)
        return 1.0

    async def both():
        scorer, longest, at = Scorer((of_last_answers(blocks, "blocks"),)), 0.0, time.perf_counter()
        marking = asyncio.ensure_future(scorer.mark(episode))
        while not marking.done():
            await asyncio.sleep(0.01)
            longest, at = max(longest, time.perf_counter() - at), time.perf_counter()
        return await marking, longest

    episode = played()
    marked, longest = asyncio.run(both())
    assert marked.parts["agent"]["blocks"] == 1.0
    assert longest < 0.25
    failed = asyncio.run(Scorer((of_last_answers(lambda _, answer: 1 / 0, "fails"),)).mark(episode))
    assert (failed.episode.ending, failed.episode.failure.stage) == (Ending.FAILED, "reward")


def test_it_is_asked_for_where_it_acts_alone():
    from agentrl.assembly.env import env_factory

    with pytest.raises(UserError, match="HopSearch-v0 has rewards of its own; set env_reward_weight"):
        env_factory("HopSearch-v0", {}, reward=RewardChoice(reward="exact_match"))
    with pytest.raises(UserError, match="SingleTurn-v0 has no reward but reward = f1; leave out env_reward"):
        env_factory("SingleTurn-v0", {}, reward=RewardChoice(reward="f1", env_reward_weight=1.0))
    env_factory("HopSearch-v0", {}, reward=RewardChoice(reward="exact_match", env_reward_weight=0.0))
