"""Prompts of a file with tools by name: the model calls, and the answer after the last call is graded."""

from __future__ import annotations

import agentrl
from agentrl import ScriptedAgent, Task, call, say
from agentrl.assembly.env import env_factory
from agentrl.assembly.load import load_config
from envs_contrib.single_turn import SingleTurn, Tools

EGGS = Task.ask("eggs", "Two boxes hold 12 eggs each. How many?", "2*12 = <<2*12=24>>24 eggs\n#### 24")


def made(**settings):
    config = load_config(None, {"env": "Tools-v0", "tools": ["calculator"], **settings}).env
    return env_factory(config.env, {}, tools=config, reward=config)()


async def rewarded(env, *messages):
    episode = await agentrl.play(env, ScriptedAgent([*messages]), EGGS, seed=0)
    return episode, episode.step_rewards[-1]


async def test_the_answer_after_the_last_call_is_graded_by_the_grader_of_the_settings():
    [name] = [schema.name for schema in made().tool_schemas]
    asks = call(name, expression="2*12")
    for settings, answer, expected in [
        ({"reward": "math"}, r"They are \boxed{24}.", 1.0),
        ({"reward": "math"}, r"They are \boxed{25}.", 0.0),
        ({"reward": "number"}, "24 eggs", 1.0),
        # Left out, an exact match with the label.
        ({}, "24", 0.0),
        ({}, EGGS.answer, 1.0),
    ]:
        episode, reward = await rewarded(made(**settings), asks, say(answer))
        assert reward == expected, (settings, answer)
        assert "24" in episode.turns[1].observation[-1].text
        assert episode.counts["tool_calls"] == 1


async def test_a_call_is_no_answer_where_there_are_tools_and_one_where_there_are_none():
    [name] = [schema.name for schema in made().tool_schemas]
    episode, _ = await rewarded(made(reward="number"), call(name, expression="20+4"), say("I do not know"))
    assert episode.step_rewards[-1] == 0.0
    assert (await rewarded(SingleTurn(), say(EGGS.answer)))[1] == 1.0
    # Without a tool it ends with the first answer, too.
    episode, reward = await rewarded(Tools(), say(EGGS.answer))
    assert (len(episode.turns), reward) == (1, 1.0)


async def test_the_expert_earns_full_marks_without_a_tool():
    env = made(reward="number")
    assert env.has_expert
    episode = await agentrl.play(env, ScriptedAgent(env.expert(EGGS)), EGGS, seed=0)
    assert episode.step_rewards == (1.0,)
