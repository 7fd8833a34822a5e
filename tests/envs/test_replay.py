"""An episode that is played again from its record: what differs is named, and nothing else is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentrl import Message, MultiAgentEnv, Reward, ScriptedAgent, Step, Task, ToolEnv, call, play, say
from agentrl.envs import Scorer
from agentrl.envs.play import Frozen
from agentrl.envs.replay import NOTHING, Difference, replay_episode
from agentrl.errors import UserError
from agentrl.types import Ending, Finish, JointStep, Limits
from tests.worlds import ASK, QUICK, Parrot, Speaker, Talk, raising, turn_tokens


class Clock(ToolEnv):
    """A tool that counts over all episodes, and a reward that depends on it."""

    id = "Clock-v0"
    limits = QUICK
    ticks = 0

    async def tick(self, text: str) -> str:
        """Count."""
        Clock.ticks += 1
        return f"{text}\n{Clock.ticks}"

    async def steady(self) -> str:
        """Return the same."""
        return "steady"

    tools = (tick, steady)

    def tasks(self, split):
        return [ASK]

    def reward(self, task, answer):
        return {"late": float(Clock.ticks > 1), "right": 1.0}


def script(*actions):
    return (action for action in actions)


def record(env, *actions, **options):
    """The episode of a script."""
    return asyncio.run(play(env, ScriptedAgent(script(*actions)), ASK, seed=7, episode_id="g0-0", **options))


def replayed(env, episode, verdicts=()):
    return asyncio.run(replay_episode(env, episode, verdicts))


def verdicts_of(env, episode):
    scored = asyncio.run(Scorer(env.rewards).judge_all([asyncio.run(Scorer(env.rewards).mark(episode))]))
    return scored.verdicts


@pytest.fixture(autouse=True)
def _stopped_clock():
    Clock.ticks = 0


@pytest.mark.parametrize(
    "actions",
    [
        (call("echo", text="a"), call("add", a=1, b=2), say("3")),
        (call("echo", txt="a"), call("nope"), say("no")),
        (call("echo", text="a"),) * 9,
        (Message("assistant"),),
    ],
)
def test_a_deterministic_episode_is_equal(actions):
    env = Parrot()
    episode = record(Parrot(), *actions)
    assert replayed(env, episode, verdicts_of(env, episode)) == []


def test_a_tool_that_is_not_deterministic_is_named_with_its_turn():
    episode = record(Clock(), call("tick", text="now"), call("steady"), say("done"))
    assert replayed(Clock(), episode) == [
        Difference(2, "result of tick", "now\n1", "now\n2"),
        Difference(
            3,
            "reward",
            '{"total": 1.0, "late": 0.0, "right": 1.0}',
            '{"total": 2.0, "late": 1.0, "right": 1.0}',
        ),
    ]


class Shorter(Parrot):
    """Ends after the first call."""

    async def step(self, action):
        step = await super().step(action)
        return step._replace(terminated=True)


class Talkative(Parrot):
    """Goes on after the answer."""

    async def step(self, action):
        step = await super().step(action)
        return (
            step._replace(terminated=False, observation=(Message("user", "And?"),))
            if step.terminated
            else step
        )


def test_an_episode_that_ends_earlier_or_later_differs():
    episode = record(Parrot(), call("echo", text="a"), say("1"))
    assert replayed(Shorter(), episode) == [
        Difference(2, "turn", "a", NOTHING),
        Difference(2, "reward", "0.0", NOTHING),
    ]
    assert replayed(Talkative(), episode) == [
        Difference(3, "turn", NOTHING, "And?"),
        Difference(None, "ending", "completed", "aborted"),
    ]


def test_counts_of_tools_and_parts_of_rewards_are_compared():
    def once(episode):
        return float(Clock.ticks)

    class Counted(Parrot):
        rewards = (Reward(once, weight=0.5),)

    episode = record(Counted(), call("echo", text="a"), say("1"))
    verdicts = verdicts_of(Counted(), episode)
    Clock.ticks = 3
    assert replayed(Counted(), episode, verdicts) == [Difference(None, "reward once", "0", "3")]

    class Strict(Parrot):
        tools = (Parrot.tools[1],)

    (result, *others) = replayed(Strict(), episode)
    assert result == Difference(2, "result of echo", "a", "There is no tool 'echo'; there are add.")
    assert others == [Difference(None, "count of tool/echo/calls", "1", NOTHING)]


def test_a_failure_of_the_environment_is_compared_and_one_of_the_agent_repeated():
    broken = raising(ConnectionError("no disk"))
    episode = record(Talk({"step": broken}), say("hello"))
    assert episode.ending is Ending.FAILED
    assert replayed(Talk({"step": broken}), episode) == []
    reward, ending = replayed(Talk(steps=[Step.finished(reward=1.0)]), episode)
    assert reward == Difference(1, "reward", NOTHING, "1.0")
    assert ending.expected.startswith("failed: step error, ConnectionError: no disk (worlds.py, line ")
    assert (ending.what, ending.actual) == ("ending", "completed")

    class Silent:
        async def act(self, observation, *, tools, session):
            raise ConnectionError("no model")

        async def close(self, session_id): ...

    episode = asyncio.run(play(Talk(), Silent(), ASK))
    assert replayed(Talk(), episode) == []


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.ABORT, Finish.STOP])
def test_an_unfinished_turn_reaches_no_environment_again(finish):
    speaker = Speaker(say("a"), tokens=[turn_tokens(2, 3, finish)])
    episode = asyncio.run(play(Talk(steps=[Step.finished(reward=1.0)]), speaker, ASK))
    assert replayed(Talk(steps=[Step.finished(reward=1.0)]), episode) == []
    # A chat endpoint has no tokens: a turn without a step was unfinished.
    bare = tuple(
        replace(part, turns=tuple(replace(t, tokens=None) for t in part.turns))
        for part in episode.trajectories
    )
    assert replayed(Talk(steps=[Step.finished(reward=1.0)]), replace(episode, trajectories=bare)) == []


class Duel(MultiAgentEnv):
    """Two agents act at once, then one; the second observes a number of the class."""

    id = "Duel-v0"
    limits = Limits(max_turns=4, max_tokens=None)
    possible_agents = ("left", "right")
    number = 1

    def tasks(self, split):
        return [ASK]

    async def reset(self, task, *, seed):
        self.acting = ("left", "right")
        return dict.fromkeys(self.possible_agents, task.prompt), {}

    async def step(self, actions):
        if len(actions) == 2:
            self.acting = ("right",)
            return JointStep.going({"right": (Message("user", f"{actions['left'].text} {self.number}"),)})
        return JointStep.finished({"left": 1.0, "right": 0.0})


def test_every_agent_plays_its_own_turns_again(monkeypatch):
    agents = {
        "left": Frozen(ScriptedAgent(script(say("a")))),
        "right": ScriptedAgent(script(say("b"), say("c"))),
    }
    episode = asyncio.run(play(Duel(), agents, ASK))
    assert replayed(Duel(), episode) == []
    monkeypatch.setattr(Duel, "number", 2)
    assert replayed(Duel(), episode) == [Difference(2, "user message of right", "a 1", "a 2")]


def test_another_number_of_agents_is_one_sentence():
    episode = record(Parrot(), say("1"))
    with pytest.raises(
        UserError, match="Duel-v0 has the agents left, right, and episode g0-0 was played by agent"
    ):
        replayed(Duel(), episode)


def test_limits_of_the_record_hold_and_differing_fields_are_shown():
    cut = replace(QUICK, max_tool_chars=3)
    env = Parrot()
    env.limits = cut
    episode = record(env, call("echo", text="abcdef"), say("1"))
    assert replayed(Parrot(), episode) == []
    tasks = Task("ask", ASK.prompt, answer="1")
    (difference,) = replayed(Parrot(), replace(episode, task=tasks))
    assert difference == Difference(2, "reward", "0.0", "1.0")
