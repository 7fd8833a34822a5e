"""Scripts in the forms in which authors write them."""

from __future__ import annotations

import asyncio
import warnings

import pytest

from agentrl import Message, ScriptedAgent, Task, call, play, say
from agentrl.envs.agents import discard
from agentrl.types import Ending
from tests.worlds import ASK, Parrot

ADD, THREE = call("add", a=2), say("3")


def generator():
    yield say((yield ADD))


async def async_generator():
    text = yield ADD
    await asyncio.sleep(0)
    yield text


async def coroutine():
    await asyncio.sleep(0)
    return [ADD, "3"]


async def coroutine_of_a_script():
    return generator()


@pytest.mark.parametrize(
    "make",
    [
        generator,
        async_generator,
        coroutine,
        coroutine_of_a_script,
        lambda: [ADD, THREE],
        lambda: (ADD, "3"),
        lambda: iter([ADD, "3"]),
    ],
)
@pytest.mark.parametrize("is_function", [True, False])
async def test_a_script_may_have_any_form(make, is_function):
    agent = ScriptedAgent((lambda prompt: make()) if is_function else make())
    episode = await play(Parrot(), agent, ASK)
    assert [turn.action for turn in episode.turns] == [ADD, THREE]
    assert episode.step_rewards == (None, 1.0)


@pytest.mark.parametrize("script", ["3", say("3"), ["3"]])
async def test_one_action_is_a_script(script):
    assert (await play(Parrot(), ScriptedAgent(script), ASK)).step_rewards == (1.0,)


@pytest.mark.parametrize("make", [async_generator, coroutine, lambda: [ADD]])
async def test_after_its_end_a_script_answers_with_nothing(make):
    agent = ScriptedAgent(make())
    for _ in range(4):
        action = (await agent.act(ASK.prompt, tools=(), session=None)).message
    assert action == say("")
    await agent.close("")


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (lambda: None, "the script is None (NoneType); yield its actions, or return a list of them"),
        (lambda: {"a": 1}, "the script is {'a': 1} (dict); yield its actions"),
        (lambda: {"3"}, "the script is {'3'} (set); yield its actions"),
        (lambda: 5, "the script is 5 (int); yield its actions"),
        (lambda: [5], "the script's action is 5 (int); an action is call(...), say(...) or text"),
        (lambda: [Message("user", "x")], "an action is call(...), say(...) or text"),
        (lambda: [], None),
    ],
)
async def test_what_is_no_script_is_a_failure_that_says_what_to_write(script, sentence):
    episode = await play(Parrot(), ScriptedAgent(lambda prompt: script()), ASK)
    if sentence is None:
        assert episode.ending is Ending.COMPLETED
    else:
        assert episode.failure.name == "act_invalid"
        assert sentence in episode.failure.detail


async def test_an_async_script_is_closed_with_its_episode():
    closed = []

    async def endless():
        try:
            while True:
                yield call("echo", text="again")
        finally:
            closed.append(True)

    await play(Parrot(), ScriptedAgent(endless()), ASK)
    assert closed == [True]


async def test_scripts_that_never_start_are_discarded_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for script in (generator(), async_generator(), coroutine(), [ADD], "3"):
            discard(script)
            await ScriptedAgent(script).close("")


def test_the_expert_of_a_task_may_be_a_list():
    class Taught(Parrot):
        def expert(self, task):
            return [ADD, task.answer]

    env = Taught()
    episode = asyncio.run(play(env, ScriptedAgent(env.expert(ASK)), Task.ask(1, "How many?", "3")))
    assert episode.step_rewards == (None, 1.0)
