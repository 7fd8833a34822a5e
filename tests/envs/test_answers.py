"""Rewards of answers by name: what counts as the same, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Task, UserError, make, play, say
from agentrl.assembly.rewards import reward_function
from agentrl.envs import ScriptedAgent
from agentrl.envs.answers import REWARDS
from agentrl.errors import ConfigError
from agentrl.tools import is_inline


def worth(name, answer, label, **metadata):
    """What an answer is worth beside a label."""
    return REWARDS[name](Task.ask("t", "?", label, **metadata), answer)


@pytest.mark.parametrize(
    ("name", "answer", "label", "value"),
    [
        ("exact_match", "The Paris.", "paris", 1),
        ("exact_match", "in Paris", "Paris", 0),
        ("exact_match", "Paris", None, 0),
        ("f1", "It is in Paris", "Paris", 2 / 5),
        ("f1", "Paris, France", "paris france", 1),
        ("f1", "Rome", "Paris", 0),
        ("f1", "Paris Paris", "Paris", 2 / 3),
        ("f1", "", "Paris", 0),
        ("f1", "the", "a", 1),
        ("number", "So it is 72.", "Half of it is 24. #### 72", 1),
        ("number", "1,000 or so", "1000.0", 1),
        ("number", "-3", "3", 0),
        ("number", "x = -3", "-3", 1),
        ("number", "3e2", "300", 1),
        ("number", ".5", "0.50", 1),
        ("number", "7 of 8", "7", 0),
        ("number", "none", "7", 0),
        ("number", "7", "none", 0),
        ("choice", "(b) because", "B", 1),
        ("choice", "**B**", "B) Tuesday", 1),
        ("choice", "Both", "B", 0),
        ("choice", "A or B", "B", 0),
        ("choice", "", "B", 0),
        ("choice", "2.", "2", 1),
        ("choice", "B", "-", 0),
    ],
)
def test_an_answer_is_worth_what_its_reward_says(name, answer, label, value):
    assert worth(name, answer, label) == pytest.approx(value)


@pytest.mark.parametrize("name", REWARDS)
def test_the_best_of_several_answers_counts(name):
    assert worth(name, "7", "5", answers=["5", "7"]) == 1
    assert worth(name, "7", "7", answers=["5", "6"]) == 0
    assert worth(name, "7", None) == 0


@pytest.mark.parametrize("name", REWARDS)
@given(st.text(), st.text())
def test_whatever_a_model_writes_is_worth_between_0_and_1(name, answer, label):
    assert 0 <= worth(name, answer, label) <= 1


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_is_quick_and_found_by_its_name(name):
    assert is_inline(REWARDS[name])
    assert reward_function(name) is REWARDS[name]


async def slow(task, answer):
    """A reward of one's own."""
    return {"right": float(answer == task.answer), "short": 0.25}


async def test_an_environment_is_graded_by_the_reward_it_is_given():
    env = make("SingleTurn-v0", reward=reward_function("tests.envs.test_answers:slow"))
    tools = [{"name": "look", "description": "Look.", "parameters": {"type": "object"}}]
    task = Task.ask("t", "?", "yes", tools=tools)
    episode = await play(env, ScriptedAgent(iter_once("yes")), task, seed=0)
    assert episode.step_rewards == (1.25,)
    assert episode.step_rewards[0].parts == {"right": 1.0, "short": 0.25}
    assert [(tool.name, tool.description) for tool in env.tool_schemas] == [("look", "Look.")]


async def test_left_out_it_is_an_exact_match():
    env = make("SingleTurn-v0")
    assert env.tool_schemas == ()
    episode = await play(env, ScriptedAgent(iter_once("The answer")), Task.ask("t", "?", "answer"), seed=0)
    assert episode.step_rewards == (1.0,)


def iter_once(text):
    yield say(text)


def test_a_name_in_place_of_a_function_is_refused_in_a_sentence():
    with pytest.raises(UserError, match="reward is 'f1', not a function; the setting `reward` names one"):
        make("SingleTurn-v0", reward="f1")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exact", "no reward `exact`. Did you mean `exact_match`?"),
        ("tests.envs.test_answers:none", "name it `package.module:name`"),
        ("tests.envs.test_answers:REWARDS", "is a dict; name a function, or an object that is one"),
        ("tests.envs.test_answers:iter_once", "called with a task and an answer"),
    ],
)
def test_what_is_no_reward_is_refused_in_a_sentence(name, sentence):
    with pytest.raises(ConfigError) as caught:
        reward_function(name)
    assert sentence in str(caught.value)
