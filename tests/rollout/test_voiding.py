"""No policy can void an episode by the calls that it chooses: it is scored, never replaced, and ends no run.

A step of `Errand` may take 0.4 s and an episode 1 s, so that a few slow calls exceed either.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from itertools import count

import pytest

from agentrl import Limits, Message, ScriptedAgent, ToolCall, ToolEnv, play, say, tool
from agentrl.data import Prompt
from agentrl.envs import Scorer
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.producer import Producer, ProducerSettings
from agentrl.tools import arguments
from agentrl.tools.arguments import PlainParameters
from agentrl.types import Ending
from tests.worlds import ASK, FOREVER_S

RIGHT = say("3")


class Errand(ToolEnv):
    """Tools that are as slow as the caller wants them to be, and an answer that is worth 1."""

    id = "Errand-v0"
    limits = Limits(
        max_turns=6, max_tokens=None, tool_timeout_s=0.3, step_timeout_s=0.4, episode_timeout_s=1.0
    )

    async def work(self, seconds: float) -> str:
        """Work."""
        await asyncio.sleep(seconds)
        return "done"

    @tool(max_concurrency=1)
    async def queue(self, seconds: float) -> str:
        """Work alone."""
        await asyncio.sleep(seconds)
        return "done"

    @tool(overrun="world")
    async def fetch(self, seconds: float) -> str:
        """Request something from a server."""
        await asyncio.sleep(seconds)
        return "done"

    tools = (work, queue, fetch)

    def tasks(self, split):
        return [ASK]

    def reward(self, task, answer):
        return float(answer == task.answer)


def calls(name, number, seconds):
    """A turn of several calls."""
    return Message(
        "assistant",
        tool_calls=tuple(ToolCall(name, {"seconds": seconds}, id=f"c{k}") for k in range(number)),
    )


VOIDING = {
    "many slow calls in a turn": [calls("work", 7, 0.15)],
    "slow calls in every turn": [calls("work", 2, 0.15)] * 5,
    "a call without end": [calls("work", 1, 60.0)],
    "a flood of calls": [calls("work", 200, 0.0)],
}
"""What a model may try, as its turns before the answer."""
QUICK_TO_VOID = [turns for turns in VOIDING.values() if len(turns) == 1]
FOREIGN = {
    "others hold the slots": [calls("queue", 4, 0.05)],
    "a slow server": [calls("fetch", 7, 0.08)],
}
"""What exceeds the same deadlines, and is not the model's fault."""


def script(turns, answer):
    for turn in (*turns, answer):
        _ = yield turn  # it is sent the world's answer


def agent(turns, answer=RIGHT):
    return ScriptedAgent(script(turns, answer))


async def group_of(turns, answer=RIGHT, size=3):
    player = GroupPlayer(Errand, lambda: agent(turns, answer), Scorer(()), size, 0, 0)
    return await player.play(Prompt(0, ASK, 0), 0)


@pytest.mark.parametrize("attempt", VOIDING)
async def test_an_overrun_that_the_model_caused_is_scored_and_counted(attempt):
    outcome = await group_of(VOIDING[attempt], say("no idea"))
    assert outcome.failed == ()
    assert outcome.group is not None
    assert [verdict.total for verdict in outcome.group.verdicts] == [0.0] * 3
    for episode in outcome.group.episodes:
        assert episode.ending is Ending.COMPLETED
        assert episode.counts.get("tool_timeouts", 0) + episode.counts.get("surplus_calls", 0) > 0


@pytest.mark.parametrize("reason", FOREIGN)
async def test_what_others_caused_is_no_overrun_of_the_model_and_no_failure(reason):
    outcome = await group_of(FOREIGN[reason])
    assert outcome.failed == ()
    for episode in outcome.finished:
        assert (episode.ending, episode.step_rewards[-1]) == (Ending.COMPLETED, 1.0)
        assert set(episode.counts) == {"tool_calls"}
        assert episode.seconds > Errand.limits.step_timeout_s


@pytest.mark.parametrize(("name", "overruns"), [("work", 1), ("fetch", 0)])
async def test_a_costly_check_of_arguments_is_scored_whoever_is_at_fault_for_an_overrun(
    monkeypatch, name, overruns
):
    monkeypatch.setattr(arguments, "_INLINE_STEPS", 0)
    monkeypatch.setattr(arguments, "thread_time", count(0.0, 9.0).__next__)
    monkeypatch.setattr(PlainParameters, "surely_fit", lambda self, values: False)
    outcome = await group_of([calls(name, 1, 0.2)])
    assert outcome.failed == ()
    for episode in outcome.finished:
        assert episode.step_rewards[-1] == 1.0
        assert episode.counts.get("tool_timeouts", 0) == overruns


TOGETHER = replace(Errand.limits, tool_timeout_s=None)
"""Without a deadline of each call."""


async def texts(turns, limits=TOGETHER):
    """The world's answers to each turn of an episode, and its counts."""
    env = Errand()
    env.limits = limits
    episode = await play(env, agent(turns), ASK)
    assert episode.ending is Ending.COMPLETED
    return [[m.text for m in turn.observation] for turn in episode.turns[1:]], episode


async def test_calls_share_the_time_of_their_turn_and_the_next_turn_has_its_own():
    (first, second), episode = await texts([calls("work", 4, 0.15), calls("work", 1, 0.01)])
    stopped = "work was stopped: the calls of this turn took longer than 0.4 s."
    left_out = "This call was not executed: the calls of this turn took longer than 0.4 s."
    num_done = first.count("done")  # two, where the machine is not busy
    assert 0 < num_done < 3
    assert first[num_done:] == [stopped, *[left_out] * (3 - num_done)]
    assert second == ["done"]
    assert episode.counts == {"tool_calls": 5, "tool_timeouts": 1, "surplus_calls": 3 - num_done}
    assert (episode.tools["work"].calls, episode.tools["work"].timeouts) == (num_done + 2, 1)


async def test_calls_share_the_time_of_their_episode_and_the_answer_is_still_graded():
    results, episode = await texts(VOIDING["slow calls in every turn"])
    flat = [text for turn in results for text in turn]
    num_done = flat.count("done")
    assert num_done > 2  # so that more than one turn had time
    assert flat[num_done:] == [
        "work was stopped: the calls of this episode took longer than 1 s.",
        *["This call was not executed: the calls of this episode took longer than 1 s."] * (9 - num_done),
    ]
    assert episode.step_rewards[-1] == 1.0


@pytest.mark.parametrize(("most", "executed"), [(16, 16), (2, 2), (None, 20)])
async def test_calls_beyond_the_number_of_a_turn_are_answered_and_not_executed(most, executed):
    (answers,), episode = await texts([calls("work", 20, 0.0)], Limits(max_calls_per_turn=most))
    sentence = f"This call was not executed: a turn may have {most} calls; repeat it in the next turn."
    assert answers == ["done"] * executed + [sentence] * (20 - executed)
    assert episode.counts.get("surplus_calls", 0) == 20 - executed
    assert episode.tools["work"].calls == executed


async def test_a_slow_server_fails_the_episode_only_where_one_request_exceeds_its_own_deadline():
    episode = await play(Errand(), agent([calls("fetch", 1, FOREVER_S)]), ASK)
    assert episode.failure.name == "tool_timeout"


class Policy:
    """A softmax over two plans: to void, or to work, which solves one task in two."""

    def __init__(self):
        self.preference = 2.0
        self.voided: dict[str, bool] = {}

    @property
    def share(self):
        """The probability of voiding."""
        return 1.0 / (1.0 + math.exp(-self.preference))

    def agent(self):
        return Chooser(self)

    def learn(self, group):
        """One step of REINFORCE with the mean of the group as baseline."""
        totals = [verdict.total for verdict in group.verdicts]
        mean = sum(totals) / len(totals)
        for verdict in group.verdicts:
            score = float(self.voided[verdict.episode_id]) - self.share
            self.preference += 4.0 * (verdict.total - mean) * score


class Chooser:
    """Draws a plan at its first turn, by the seed of its episode."""

    def __init__(self, policy):
        self.policy = policy
        self.plan = None

    async def act(self, observation, *, tools, session):
        if self.plan is None:
            rng = random.Random(session.seed)
            voids = self.policy.voided[session.id] = rng.random() < self.policy.share
            answer = RIGHT if not voids and rng.random() < 0.5 else say("no idea")
            turns = rng.choice(QUICK_TO_VOID) if voids else [calls("work", 1, 0.0)]
            self.plan = agent(turns, answer)
        return await self.plan.act(observation, tools=tools, session=session)

    async def close(self, session_id):
        """Nothing is open."""


async def test_a_policy_that_may_void_unlearns_it_and_never_ends_the_run():
    policy, ordinals = Policy(), count()
    player = GroupPlayer(Errand, policy.agent, Scorer(()), size=8, retries=1, seed=0)
    producer = Producer(
        lambda: Prompt(next(ordinals), ASK, 0), player.play, ProducerSettings(4, max_broken=1)
    )
    shares = [policy.share]
    for step in range(6):
        for outcome in await producer.take():
            assert outcome.failed == ()
            policy.learn(outcome.group)
        producer.advance(step + 1, version=step + 1)
        shares.append(policy.share)
    assert next(ordinals) == 6 * 4
    assert shares[0] > 0.85
    assert shares[-1] < 0.15
