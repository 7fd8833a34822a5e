"""An agent over a chat endpoint: what it sends, what it reads, what it makes of every way to fail."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from agentrl import Limits, Message, Task, ToolCall, play
from agentrl.rollout.chat.agent import ChatAgent
from agentrl.rollout.chat.endpoint import ChatEndpoint
from agentrl.rollout.chat.settings import ChatSettings, Prices
from agentrl.types import Ending, History, Restart, Step, Usage
from tests.rollout.chat.chat_server import ChatServer, refusal, reply, said
from tests.worlds import Parrot, Talk

ASK = Task.ask("t", "How many are 2 and 1?", "3")


def endpoint(server, **options):
    return ChatEndpoint(url=server.url, **{"attempts": 2, "timeout_s": 20.0, **options})


@asynccontextmanager
async def agents(server, settings=None, **options):
    async with server.serving(), endpoint(server, **options).connected() as connection:
        yield lambda: ChatAgent(connection, settings or ChatSettings("m"))


async def episode(server, env=None, settings=None, **options):
    """One episode against a server."""
    async with agents(server, settings, **options) as agent:
        return await play(env or Parrot(), agent(), ASK)


async def test_a_conversation_with_tools_is_sent_as_the_api_documents_it():
    called = said(None, [("add", '{"a": 2}'), ("echo", '{ "text":"hi"}')])
    server = ChatServer(lambda request: called if len(request["messages"]) == 1 else said("3"))
    settings = ChatSettings("m", temperature=0.5, max_tokens=64, body={"top_p": 0.9})
    played = await episode(server, settings=settings)
    assert (played.ending, played.step_rewards) == (Ending.COMPLETED, (None, 1.0))
    first, second = server.asked
    assert first["messages"] == [{"role": "user", "content": "How many are 2 and 1?"}]
    assert [one["type"] for one in first["tools"]] == ["function", "function"]
    assert [one["function"]["name"] for one in first["tools"]] == ["echo", "add"]
    assert first["tools"][1]["function"]["description"] == "Add two numbers."
    assert first["tools"][1]["function"]["parameters"]["required"] == ["a"]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.5, 64)
    assert first["top_p"] == 0.9
    assert 0 <= first["seed"] < 2**31
    assert first["seed"] != second["seed"]
    assistant, *answers = second["messages"][1:]
    assert (assistant["role"], assistant["content"]) == ("assistant", None)
    assert [json.loads(one["function"]["arguments"]) for one in assistant["tool_calls"]] == [
        {"a": 2},
        {"text": "hi"},
    ]
    assert answers == [
        {"role": "tool", "tool_call_id": "call_0_add", "content": "3"},
        {"role": "tool", "tool_call_id": "call_1_echo", "content": "hi"},
    ]


async def test_without_tools_none_are_sent_and_fields_can_be_left_out():
    server = ChatServer()
    settings = ChatSettings("m", omit=("temperature", "seed"))
    env = Talk(steps=[Step.finished(reward=1.0)])
    await episode(server, env, settings)
    assert set(server.asked[0]) == {"model", "messages"}
    assert env.heard == [Message("assistant", "ok")]


async def test_usage_and_cost_are_counted_for_every_episode():
    calls = said(None, [("add", '{"a": 2}')])
    server = ChatServer(
        lambda request: calls if len(request["messages"]) == 1 else said("3"),
        429,
        headers="Retry-After: 0\r\n",
    )
    played = await episode(server, settings=ChatSettings("m", prices=Prices(2.5, 10.0, 1.25)))
    per_turn = (20 - 8) * 2.5 + 8 * 1.25 + 5 * 10.0
    assert played.usage == Usage(40, 10, 16, 4, pytest.approx(2 * per_turn / 1e6))
    assert played.counts == {"chat/requests": 3, "chat/retries": 1, "tool_calls": 1}


async def test_a_turn_of_unknown_usage_is_told_as_such():
    played = await episode(ChatServer(lambda request: said("3"), reply(said("3"), usage=None)))
    assert played.counts == {"chat/requests": 1, "chat/uncounted": 1}


@pytest.mark.parametrize("kept", ["keep", "drop"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_read_and_sent_back_where_it_is_kept(kept, field):
    thought = said(None, [("add", '{"a": 2}')], **{field: "two and one"})
    server = ChatServer(lambda request: thought if len(request["messages"]) == 1 else said("3"))
    played = await episode(server, settings=ChatSettings("m", reasoning=kept))
    assert played.turns[0].action.reasoning == "two and one"
    sent = server.asked[1]["messages"][1]
    assert sent.get(field) == ("two and one" if kept == "keep" else None)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('{"a": 2', "add: the arguments are no JSON"),
        ("[2]", "add: the arguments must be a JSON object, not '[2]'."),
        ("null", "add: the arguments must be a JSON object"),
        ("[" * 100_000, "add: the arguments are no JSON (nested too deep)"),
        ('{"a": "\\ud800"}', "add: the arguments are no JSON (it cannot be stored)"),
    ],
)
async def test_broken_arguments_are_a_sentence_for_the_model_and_sent_back_as_json(arguments, error):
    broken = said(None, [("add", arguments)])
    server = ChatServer(lambda request: broken if len(request["messages"]) == 1 else said("3"))
    played = await episode(server)
    (wrong,) = played.turns[0].action.tool_calls
    assert wrong.arguments is None
    assert wrong.raw == arguments
    assert wrong.error.startswith(error)
    sent = server.asked[1]["messages"]
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"unreadable": arguments}
    assert sent[2] == {"role": "tool", "tool_call_id": "call_0_add", "content": wrong.error}
    assert played.counts["malformed_calls"] == 1
    assert played.step_rewards == (None, 1.0)


async def test_calls_without_a_name_or_an_id_or_with_one_id_twice_are_told_apart():
    function = {"name": "echo", "arguments": '{"text": "x"}'}
    calls = [{"id": "same", "function": function}, {"id": "same", "function": function}]
    calls += [{"function": {"arguments": "{}"}}, "nonsense", {"function": {"name": "a b", "arguments": {}}}]
    odd = said(None) | {"tool_calls": calls}
    server = ChatServer(lambda request: odd if len(request["messages"]) == 1 else said("3"))
    played = await episode(server)
    made = played.turns[0].action.tool_calls
    assert len({one.id for one in made}) == len(made) == 5
    assert made[4] == ToolCall("a b", {}, id="call_4")
    sent = server.asked[1]["messages"]
    assert [one["function"]["name"] for one in sent[1]["tool_calls"]] == [
        "echo",
        "echo",
        "unnamed",
        "unnamed",
        "a_b",
    ]
    assert [one["tool_call_id"] for one in sent[2:]] == [one.id for one in made]
    assert [one["content"] for one in sent[2:4]] == ["x", "x"]
    assert "names no tool" in sent[4]["content"]
    assert (played.counts["malformed_calls"], played.counts["unknown_tools"]) == (2, 1)


@pytest.mark.parametrize("blank", ["", " ", None])
async def test_no_arguments_at_all_are_an_empty_object(blank):
    bare = said(None) | {"tool_calls": [{"id": "c", "function": {"name": "echo", "arguments": blank}}]}
    played = await episode(ChatServer(lambda request: bare if len(request["messages"]) == 1 else said("3")))
    assert played.turns[0].action.tool_calls == (ToolCall("echo", {}, id="c"),)
    assert played.counts["rejected_calls"] == 1


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (said("3"), "3"),
        (said(None), ""),
        (said(None, refusal="I can't."), "I can't."),
        ({"role": "assistant"}, ""),
        (said([{"type": "text", "text": "3"}, {"type": "text", "text": "!"}, 7]), "3!"),
        (said("half \ud800 a pair"), "half ? a pair"),
    ],
)
async def test_whatever_content_there_is_is_the_answer(message, content):
    played = await episode(ChatServer(lambda request: message))
    assert played.turns[-1].action == Message("assistant", content)
    assert played.step_rewards == (float(content == "3"),)
    assert played.counts.get("chat/refusals", 0) == int(content == "I can't.")


@pytest.mark.parametrize(
    ("behaviour", "counted"),
    [
        (reply(said("thr"), "length"), "chat/length"),
        (reply(said(None, [("add", '{"a"')]), "length"), "chat/length"),
        (reply(said(None), "content_filter"), "chat/content_filter"),
        ((400, refusal("too much", "context_length_exceeded")), "chat/context_full"),
        (
            (400, refusal("The input (9 tokens) is longer than the model's context length")),
            "chat/context_full",
        ),
    ],
)
async def test_a_turn_that_was_cut_truncates_the_episode_and_is_scored(behaviour, counted):
    env = Talk()
    played = await episode(ChatServer(lambda request: said("x"), behaviour), env)
    assert played.ending is Ending.TRUNCATED
    assert played.failure is None
    assert played.counts[counted] == 1
    assert env.heard == [], "the world is never shown an unfinished message"


async def test_an_episode_of_so_many_tokens_is_cut_where_they_are_used_up():
    def env(most):
        world = Talk()
        world.limits = Limits(max_turns=4, max_tokens=most)
        return world

    def usage(request):
        turns = sum(one["role"] == "assistant" for one in request["messages"]) + 1
        return reply(said("x"), usage={"prompt_tokens": 10 * turns, "completion_tokens": 5})

    for most, turns, asked in ((100, 4, [100, 85, 75, 65]), (24, 2, [24, 9]), (15, 2, [15]), (14, 1, [14])):
        server = ChatServer()
        server.play = lambda request: None
        server.behaviours = [usage({"messages": [{"role": "assistant"}] * n}) for n in range(4)]
        played = await episode(server, env(most))
        assert [one["max_tokens"] for one in server.asked] == asked
        assert (len(played.turns), played.ending) == (turns, Ending.TRUNCATED)


async def test_a_history_begins_the_conversation_anew():
    history = Step.restarted(
        Message("system", "Be brief."),
        Message("user", "What was it?"),
        Message("assistant", tool_calls=(ToolCall("echo", {"text": "b"}), ToolCall("echo", {"text": "c"}))),
        Message("tool", "b"),
        reason=Restart.COMPACTED,
    )
    server = ChatServer()
    played = await episode(server, Talk(steps=[history, Step.finished(reward=1.0)]))
    assert [one.reason for one in played.trajectories] == [None, Restart.COMPACTED]
    messages = server.asked[1]["messages"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "tool", "tool"]
    ids = [one["id"] for one in messages[2]["tool_calls"]]
    assert [one["tool_call_id"] for one in messages[3:]] == ids
    assert [one["content"] for one in messages[3:]] == ["b", ""]
    assert len(set(ids)) == 2


async def test_a_history_at_the_beginning_is_no_restart():
    class Rewritten(Talk):
        async def reset(self, task, *, seed):
            return History(task.prompt, Restart.REWRITTEN), {}

    played = await episode(ChatServer(), Rewritten(steps=[Step.finished(reward=1.0)]))
    assert len(played.trajectories) == 1


async def test_every_call_is_answered_once_and_answers_to_none_are_the_users():
    two = said(None, [("echo", "{}"), ("add", "{}")])
    steps = [Step.going(Message("tool", "early")), Step.going(Message("tool", "late"), Message("user", "u"))]
    server = ChatServer(lambda request: two if len(request["messages"]) == 1 else said("x"))
    await episode(server, Talk(steps=[*steps, Step.finished(reward=0.0)]))
    shown = [(one["role"], one.get("tool_call_id"), one["content"]) for one in server.asked[-1]["messages"]]
    assert shown[2:] == [
        ("tool", "call_0_echo", "early"),
        ("tool", "call_1_add", ""),
        ("assistant", None, "x"),
        ("user", None, "late"),
        ("user", None, "u"),
    ]


async def test_agents_share_connections_and_no_more_ask_at_once_than_allowed():
    server = ChatServer(lambda request: said("3"))
    server.gate.clear()
    async with agents(server, max_requests=3) as agent:
        playing = [asyncio.create_task(play(Parrot(), agent(), ASK)) for _ in range(9)]
        while server.counts["running"] < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        server.gate.set()
        assert all(one.step_rewards == (1.0,) for one in await asyncio.gather(*playing))
    assert server.most == 3
    assert server.counts["connections"] <= 3
    assert server.counts["requests"] == 9


async def test_cancelling_closes_the_socket_and_leaves_no_task():
    server = ChatServer(lambda request: said("3"), "hang")
    before = asyncio.all_tasks()
    async with agents(server) as agent:
        playing = asyncio.create_task(play(Parrot(), agent(), ASK))
        await server.arrived.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await asyncio.wait_for(server.closed.wait(), 10)
        assert server.counts["requests"] == 1
        assert (await play(Parrot(), agent(), ASK)).step_rewards == (1.0,), "others go on"
    assert asyncio.all_tasks() <= before
