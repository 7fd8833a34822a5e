"""AgentDojo's worlds: gold calls, refused calls, and that equal episodes are equal."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from agentrl import UserError, call, make, say
from envs_contrib.agentdojo import library
from envs_contrib.agentdojo.env import VERSION
from tests.envs_contrib.dojo import (
    FREE,
    IMPORTANT,
    LONG,
    NUM_TASKS,
    QUICK,
    expert,
    id_of,
    names,
    played,
    silent,
    suites,
    tasks_of,
)

DETERMINED = """
import asyncio, hashlib
from agentrl import ScriptedAgent, call, make, play, say
def script():
    yield call("create_calendar_event", title="t", start_time="2024-05-20 10:00", end_time="2024-05-20 11:00",
               participants=[f"{name}@example.com" for name in ("zoe", "ann", "mel", "bob", "kim")])
    yield call("search_emails", query="Invitation: t")
    yield call("create_file", filename="f", content="c")
    yield say("done")
env = make("AgentDojoWorkspace-v0")
episode = asyncio.run(play(env, ScriptedAgent(script()), env.tasks("test")[0]))
print(repr([turn.observation for turn in episode.turns]))
"""
IMPORTED = """
import sys
import agentrl
env = agentrl.make("AgentDojoSlack-v0")
assert "agentdojo" not in sys.modules
sys.modules["agentdojo"] = None
try:
    env.tasks("test")
except agentrl.UserError as error:
    print(error)
del sys.modules["agentdojo"]
assert len(env.tasks("test")) == 21
clients = {"anthropic", "cohere", "google.genai", "langchain", "openai", "torch", "agentdojo.agent_pipeline"}
print(*sorted(clients & set(sys.modules)))
"""


@suites
async def test_the_gold_calls_of_every_user_task_are_paid(suite):
    tasks = tasks_of(suite)
    assert len(tasks) == NUM_TASKS[suite][0]
    episodes = await played(suite, expert, tasks)
    assert {episode.task.id: episode.step_rewards[-1] for episode in episodes} == dict.fromkeys(
        names(episodes), 1.0
    )
    assert {episode.counts.get("rejected_calls", 0) for episode in episodes} == {0}


@pytest.mark.parametrize("suite", LONG)
async def test_the_gold_calls_of_the_first_tasks_are_paid(suite):
    episodes = await played(suite, expert, tasks_of(suite)[:4])
    assert [episode.step_rewards[-1] for episode in episodes] == [1.0] * 4


@suites
async def test_silence_earns_the_declared_chance(suite):
    episodes = await played(suite, silent, tasks_of(suite))
    assert names(e for e in episodes if e.step_rewards == (1.0,)) == FREE.get(suite, set())
    assert make(id_of(suite)).chance_score == len(FREE.get(suite, ())) / len(episodes)


async def test_what_an_agent_writes_is_in_its_own_episode_only_and_stamped_by_the_worlds_clock():
    def script(env, task):
        del env, task
        yield call("send_email", recipients=["a@example.com"], subject="s", body="b")
        yield call("get_sent_emails")
        yield say("")

    first, second = await played("Workspace", script, tasks_of("Workspace")[:2])
    assert [t.observation for t in first.turns][1:] == [t.observation for t in second.turns][1:]
    assert "timestamp: 2024-05-30 14:11:00" in first.turns[1].observation[0].text
    assert first.turns[2].observation[0].text.count("a@example.com") == 1


@pytest.mark.full
def test_an_episode_is_the_same_in_every_process():
    def output(hash_seed):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", DETERMINED]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout

    assert output("1") == output("2")


def test_a_function_that_changes_its_arguments_does_not_change_the_recorded_call():
    participants = ["a@example.com"]

    def script(env, task):
        del env, task
        times = {"start_time": "2024-05-20 10:00", "end_time": "2024-05-20 11:00"}
        yield call("create_calendar_event", title="t", participants=participants, **times)
        yield say("")

    (episode,) = asyncio.run(played("Workspace", script, tasks_of("Workspace")[:1]))
    assert episode.counts.get("rejected_calls") is None
    assert episode.turns[0].action.tool_calls[0].arguments["participants"] == ["a@example.com"]


@pytest.mark.parametrize("suite", QUICK)
def test_results_have_the_text_of_the_librarys_own_pipeline(suite):
    made = library.get_suites(VERSION)[suite.lower()]
    state = made.load_and_inject_default_environment({})
    runtime = library.FunctionsRuntime(made.tools)
    texts = []
    for user_task in made.user_tasks.values():
        for gold in user_task.ground_truth(state.model_copy(deep=True)):
            result, _ = runtime.run_function(state, gold.function, gold.args)
            texts.append((library.printed(result), library.tool_result_to_str(result)))
    assert len(texts) > 20
    assert [ours for ours, _ in texts] == [theirs for _, theirs in texts]


@pytest.mark.parametrize("suite", NUM_TASKS)
def test_states_are_those_of_the_librarys_own_reader(suite):
    made = library.get_suites(VERSION)[suite.lower()]
    vectors = dict.fromkeys(made.get_injection_vector_defaults(), "\n\n<INFORMATION>\n\nIt's: {one} – two.\n")
    for injections in ({}, vectors):
        ours, theirs = (
            source.load_and_inject_default_environment(injections)
            for source in (library.loading_fast(made), made)
        )
        assert ours == theirs


async def test_an_exception_of_a_check_is_no_failure_of_the_world(monkeypatch):
    user_task = library.get_suites(VERSION)["slack"].user_tasks["user_task_0"]

    def utility(self, *_):
        raise KeyError("an email that the agent has deleted")

    monkeypatch.setattr(type(user_task), "utility", utility)
    (episode,) = await played("Slack", silent, tasks_of("Slack")[:1])
    assert (episode.failure, episode.step_rewards) == (None, (0.0,))


async def test_a_call_that_the_suite_refuses_is_a_sentence_for_the_model():
    def script(env, task):
        del env, task
        yield call("read_channel_messages", channel="no_such_channel")
        yield call("read_channel_messages", channel="general", limit=3)
        yield call("read_channel_messages", channel=5)
        yield say("")

    (episode,) = await played("Slack", script, tasks_of("Slack")[:1])
    refused, unknown, converted = (turn.observation[0].text for turn in episode.turns[1:])
    assert refused == "ValueError: Channel does not exist!"
    assert "there is no parameter `limit`" in unknown
    assert converted == refused
    assert episode.tools["read_channel_messages"].coerced == 1


def test_tasks_can_be_split_for_training():
    env = make(id_of("Slack"), held_out=4, **IMPORTANT)
    train, test = ({task.metadata["user_task"] for task in env.tasks(split)} for split in env.splits)
    assert (len(train), len(test), train & test) == (15, 6, set())
    assert len(env.tasks("train")) == 15 * 5
    assert {task.split for task in env.tasks("train")} == {"train"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"attack": "importent"}, "AgentDojo has no attack `importent`; it has direct, "),
        ({"attack": "manual"}, "AgentDojo has no attack `manual`"),
        ({"suite": "shopping"}, "AgentDojo has no suite `shopping`; it has workspace, "),
        ({"version": "v9"}, "AgentDojo has no version `v9`"),
        ({"target": "gpt-4o-2024-05-13"}, "has no effect without an attack"),
        ({"target": "nobody", **IMPORTANT}, "AgentDojo cannot attack the model `nobody`: "),
        ({"held_out": 1}, "held_out is 0 or at least 2, got 1"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        make(id_of("Slack"), **arguments).tasks("test")


async def test_a_task_of_ones_own_data_is_refused():
    env = make(id_of("Slack"))
    task = tasks_of("Slack")[0]
    with pytest.raises(UserError, match="leave out prompt_data"):
        await env.reset(type(task).ask("mine", "Do it."), seed=0)


def test_the_library_is_imported_at_its_first_use_without_the_clients_of_vendors():
    command = [sys.executable, "-c", IMPORTED]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [
        "AgentDojo needs the package agentdojo; install it with `pip install 'agentrl[agentdojo]'`.",
        "",
    ]
