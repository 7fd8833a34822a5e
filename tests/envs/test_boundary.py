"""Plain functions, Gymnasium's return values and exit(), between an environment and the episode loop."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace

import pytest

from agentrl import (
    Env,
    Image,
    Message,
    MultiAgentEnv,
    ScriptedAgent,
    Step,
    Task,
    Text,
    ToolCall,
    play,
    register,
)
from agentrl.envs import AgentView
from agentrl.envs.gym import GymnasiumFace
from agentrl.tools import inline
from agentrl.types import Ending, Restart
from tests.worlds import ASK, QUICK, Hang, Speaker


class Counting(Env):
    """Gymnasium's habits: plain functions, text, a pair and five values."""

    limits = QUICK

    def tasks(self, split):
        return [ASK]

    def reset(self, task, *, seed):
        self.steps, self.threads = 0, {threading.get_ident()}
        return f"count from {self.rng.randrange(1000)}", {"seed": seed}

    def step(self, action):
        self.steps += 1
        self.threads.add(threading.get_ident())
        return f"{action.text} is {self.steps}", 0.5, self.steps == 2, False, {}


def stepping(result):
    """An environment whose step returns `result`."""

    class Steps(Counting):
        @inline
        def step(self, action):
            return result

    return Steps()


def resetting(result):
    """An environment whose reset returns `result`."""

    class Resets(Counting):
        @inline
        def reset(self, task, *, seed):
            self.steps = 1
            return result

    return Resets()


def observed(episode):
    return [[(message.role, message.text) for message in turn.observation] for turn in episode.turns]


async def played(env, *actions, seed=0):
    return await play(env, ScriptedAgent(list(actions)), ASK, seed=seed)


async def test_an_environment_with_gymnasiums_habits_is_played():
    episode = await played(Counting(), "one", "two", seed=3)
    assert (episode.ending, episode.failure) == (Ending.COMPLETED, None)
    assert episode.step_rewards == (0.5, 0.5)
    first = f"count from {random.Random(3).randrange(1000)}"
    assert observed(episode) == [[("user", first)], [("user", "one is 1")]]


async def test_plain_functions_run_in_threads_unless_they_are_inline():
    env = Counting()
    await played(env, "one", "two")
    assert threading.get_ident() not in env.threads

    class OnTheLoop(Counting):
        @inline
        def reset(self, task, *, seed):
            return super().reset(task, seed=seed)

        @inline
        def step(self, action):
            return super().step(action)

    env = OnTheLoop()
    assert (await played(env, "one", "two")).ending is Ending.COMPLETED
    assert env.threads == {threading.get_ident()}


async def test_the_deadline_of_a_step_ends_the_wait_for_a_plain_function():
    class Slow(Counting):
        limits = replace(QUICK, step_timeout_s=0.05)

        def step(self, action):
            over.wait(20)

    over = threading.Event()
    try:
        began = time.perf_counter()
        episode = await played(Slow(), "one")
        assert episode.failure.name == "step_timeout"
        assert time.perf_counter() - began < 5
    finally:
        over.set()


async def test_a_plain_close_is_called_and_its_error_is_counted():
    closed = []

    class Closing(Counting):
        def close(self):
            closed.append(self)

    class Torn(Counting):
        def close(self):
            raise OSError("still open")

    assert (await played(Closing(), "one", "two")).failure is None
    assert len(closed) == 1
    torn = await played(Torn(), "one", "two")
    assert (torn.failure, torn.counts) == (None, {"failed_closes": 1})


@pytest.mark.parametrize(
    ("result", "texts"),
    [
        (("first", {}), [("user", "first")]),
        (["first", None], [("user", "first")]),
        ((ASK.prompt, {}), [("user", "How many?")]),
        ((Message("system", "Be brief."), {}), [("system", "Be brief.")]),
        ((["first", {"role": "system", "content": "second"}], {}), [("user", "first"), ("system", "second")]),
    ],
)
async def test_reset_may_return_text_and_messages(result, texts):
    assert observed(await played(resetting(result), "one"))[0] == texts


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (None, "Resets.reset returned None (NoneType); return a pair"),
        ("first", "Resets.reset returned 'first' (str); return a pair"),
        (("first",), "return a pair, such as `task.prompt, {}`"),
        (("first", "second"), "Resets.reset returned 'second' (str) as its info; return a dict"),
        ((5, {}), "Resets.reset returned an observation that cannot be read: it is 5 (int); write text, or"),
    ],
)
async def test_a_reset_without_a_clear_meaning_fails_with_what_to_return(result, sentence):
    episode = await played(resetting(result), "one")
    assert episode.failure.name == "reset_invalid"
    assert sentence in episode.failure.detail


@pytest.mark.parametrize(
    ("result", "rewards"),
    [
        ((None, 1, True, False, None), (1.0,)),
        (["done", None, True, False, {}], (None,)),
        (Step.finished("done", reward=0.5), (0.5,)),
        (((), {"right": 1.0, "short": 0.25}, True, False, {}), (1.25,)),
    ],
)
async def test_step_may_return_five_values(result, rewards):
    episode = await played(stepping(result), "one")
    assert episode.ending is Ending.COMPLETED
    assert episode.step_rewards == rewards
    if rewards == (1.25,):
        assert episode.step_rewards[0].parts == {"right": 1.0, "short": 0.25}


@pytest.mark.parametrize(
    ("result", "name", "sentence"),
    [
        (
            None,
            "step_invalid",
            "Steps.step returned None (NoneType); return a Step, or Gymnasium's five values",
        ),
        (("x", 1.0, True, {}), "step_invalid", "Steps.step returned 4 values; return a Step"),
        ("x", "step_invalid", "Steps.step returned 'x' (str)"),
        (
            ({"a": 1}, 1.0, True, False, {}),
            "step_invalid",
            "it holds {'a': 1} (dict); write text, or Messages",
        ),
        (
            ("x", 1.0, None, False, {}),
            "step_invalid",
            "None (NoneType) as `terminated`; return True or False",
        ),
        (("x", 1.0, True, 1, {}), "step_invalid", "1 (int) as `truncated`"),
        (("x", 1.0, True, False, 5), "step_invalid", "5 (int) as its info; return a dict"),
        (("x", "1", True, False, {}), "reward_invalid", "the reward is '1', return a finite number"),
        (("x", {"a": None}, True, False, {}), "reward_invalid", "the part `a` of the reward is None"),
    ],
)
async def test_a_step_without_a_clear_meaning_fails_with_what_to_return(result, name, sentence):
    episode = await played(stepping(result), "one")
    assert episode.failure.name == name
    assert sentence in episode.failure.detail
    assert episode.step_rewards == ()


async def test_a_history_remains_one():
    env = stepping(Step.restarted(Message("user", "again"), reason=Restart.COMPACTED))
    episode = await play(env, Speaker(), ASK)
    assert [type(turn.observation).__name__ for turn in episode.turns[:2]] == ["tuple", "History"]
    assert episode.turns[1].observation.reason is Restart.COMPACTED


async def test_a_cancellation_still_ends_an_episode():
    hang = Hang()

    class Hangs(Counting):
        async def step(self, action):
            await hang()

    episode = asyncio.create_task(played(Hangs(), "one"))
    await hang.entered.wait()
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode


class Relay(MultiAgentEnv):
    """Two agents, in the forms of PettingZoo's and Gymnasium's users."""

    possible_agents = ("first", "second")
    limits = QUICK

    def tasks(self, split):
        yield Task.ask(1, "Go on.")

    def reset(self, task, *, seed):
        self.acting = "first"
        return {"first": f"go {self.rng.randrange(1000)}"}, {}

    def step(self, actions):
        if self.acting == "first":
            self.acting = "second"
            return {"second": actions["first"].text}, None, False, False, {}
        return {}, {"first": 1, "second": 0.5}, True, False, {}

    async def expert(self, task, agent, prompt):
        yield f"{agent} read {prompt}"

    def opponent(self, task, agent, prompt, rng):
        return ["pass"]


async def test_an_environment_of_several_agents_may_have_the_same_habits():
    env = Relay()
    agents = {
        name: ScriptedAgent(lambda prompt, name=name: env.expert(ASK, name, prompt))
        for name in env.possible_agents
    }
    episode = await play(env, agents, ASK, seed=3)
    number = random.Random(3).randrange(1000)
    assert episode.failure is None
    assert [turn.action.text for turn in episode.turns] == [
        f"first read go {number}",
        f"second read first read go {number}",
    ]
    assert episode.rewards_of("first") == (1.0,)
    assert episode.rewards_of("second") == (0.5,)


@pytest.mark.parametrize(("agent", "reward"), [("first", 1.0), ("second", 0.5)])
async def test_a_view_of_one_agent_has_the_same_habits(agent, reward):
    view = AgentView(Relay(), agent)
    episode = await play(view, ScriptedAgent(view.expert(ASK)), ASK)
    assert episode.total_of() == reward
    assert episode.turns[-1].action.text.startswith(f"{agent} read ")


@pytest.mark.parametrize(
    ("observations", "sentence"),
    [
        ("x", "Wrong.step returned the observations 'x' (str); write one for each agent by name"),
        ({"second": 5}, "Wrong.step returned an observation that cannot be read: it is 5 (int)"),
    ],
)
async def test_joint_steps_without_a_clear_meaning_fail_with_what_to_return(observations, sentence):
    class Wrong(Relay):
        def step(self, actions):
            return observations, None, False, False, {}

    agents = dict.fromkeys(Relay.possible_agents, ScriptedAgent(["x"]))
    episode = await play(Wrong(), agents, ASK)
    assert episode.failure.name == "step_invalid"
    assert sentence in episode.failure.detail


def test_the_name_of_an_agent_whose_turn_it_is_is_no_part_of_another_name():
    class Tens(Relay):
        possible_agents = ("player_1", "player_10")

        def reset(self, task, *, seed):
            self.acting = "player_10"
            return {"player_10": "go"}, {}

        def step(self, actions):
            return {}, 1.0, True, False, {}

    agents = {name: ScriptedAgent([name]) for name in Tens.possible_agents}
    episode = asyncio.run(play(Tens(), agents, ASK))
    assert [turn.action.text for turn in episode.turns] == ["player_10"]


def test_in_gymnasium_such_an_environment_is_any_other():
    register("Counting-v0", Counting)
    env = GymnasiumFace("Counting-v0")
    observation, info = env.reset(seed=0)
    assert observation.startswith("count from ")
    assert info["seed"] >= 0
    assert env.step("<answer> one</answer>")[:4] == ("one is 1", 0.5, False, False)
    assert env.step("<answer> two</answer>")[:4] == ("two is 2", 0.5, True, False)
    env.close()


HALF, PAIR = "a\ud800b", "a\U0001f600b"
IMAGE = Image.of(b"x")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (HALF, Message("user", "a?b")),
        (PAIR, Message("user", PAIR)),
        ({"role": "system", "content": HALF}, Message("system", "a?b")),
        (Message("user", (Text(HALF), IMAGE)), Message("user", (Text("a?b"), IMAGE))),
        (Message("tool", HALF, None, (), HALF, HALF), Message("tool", "a?b", None, (), "a?b", "a?b")),
        (
            Message("assistant", HALF, HALF, (ToolCall(HALF, {HALF: [HALF, 1]}, HALF, HALF),)),
            Message("assistant", "a?b", "a?b", (ToolCall("a?b", {"a?b": ["a?b", 1]}, "a?b", "a?b"),)),
        ),
    ],
)
async def test_half_a_surrogate_pair_from_an_environment_is_a_question_mark(said, expected):
    # As Python encodes it where it may replace, and as results of tools hold it.
    assert HALF.encode("utf-8", "replace").decode() == "a?b"
    for env in (stepping((said, 0.0, False, False, {})), resetting((said, {}))):
        episode = await played(env, "one", "two")
        assert expected in [message for turn in episode.turns for message in turn.observation]


async def test_a_task_with_half_a_surrogate_pair_is_played():
    class Asks(Counting):
        def reset(self, task, *, seed):
            self.steps = 1
            return task.prompt, {}

    episode = await play(Asks(), ScriptedAgent(["one"]), Task.ask("1", HALF), seed=0)
    assert episode.turns[0].observation == (Message("user", "a?b"),)


async def test_a_rewritten_history_keeps_its_reason_without_halves_of_pairs():
    env = stepping(Step.restarted(Message("user", HALF), reason=Restart.COMPACTED))
    episode = await played(env, "one", "two")
    assert [message.text for message in episode.turns[1].observation] == ["a?b"]
    assert episode.turns[1].observation.reason is Restart.COMPACTED
