"""An agent over a chat endpoint: its requests, its parsing of replies, and its failures."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from agentrl import Limits, Message, Task, ToolCall, play
from agentrl.engine.chat.agent import ChatAgent
from agentrl.engine.chat.endpoint import ChatEndpoint
from agentrl.engine.chat.settings import ChatSettings, Prices
from agentrl.types import Ending, History, Restart, Step, Usage
from tests.engine.chat.chat_server import ChatServer, assistant, refusal, reply
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
    called = assistant(None, [("add", '{"a": 2}'), ("echo", '{ "text":"hi"}')])
    server = ChatServer(lambda request: called if len(request["messages"]) == 1 else assistant("3"))
    settings = ChatSettings("m", temperature=0.5, max_tokens=64, body={"top_p": 0.9})
    played = await episode(server, settings=settings)
    assert (played.ending, played.step_rewards) == (Ending.COMPLETED, (None, 1.0))
    first, second = server.requests
    assert first["messages"] == [{"role": "user", "content": "How many are 2 and 1?"}]
    assert [tool["type"] for tool in first["tools"]] == ["function", "function"]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["echo", "add"]
    assert first["tools"][1]["function"]["description"] == "Add two numbers."
    assert first["tools"][1]["function"]["parameters"]["required"] == ["a"]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.5, 64)
    assert first["top_p"] == 0.9
    assert 0 <= first["seed"] < 2**31
    assert first["seed"] != second["seed"]
    turn, *results = second["messages"][1:]
    assert (turn["role"], turn["content"]) == ("assistant", None)
    assert [json.loads(call["function"]["arguments"]) for call in turn["tool_calls"]] == [
        {"a": 2},
        {"text": "hi"},
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "call_0_add", "content": "3"},
        {"role": "tool", "tool_call_id": "call_1_echo", "content": "hi"},
    ]


async def test_without_tools_none_are_sent_and_fields_can_be_left_out():
    server = ChatServer()
    settings = ChatSettings("m", omit=("temperature", "seed"))
    env = Talk(steps=[Step.finished(reward=1.0)])
    await episode(server, env, settings)
    assert set(server.requests[0]) == {"model", "messages"}
    assert env.actions == [Message("assistant", "ok")]


async def test_usage_and_cost_are_counted_for_every_episode():
    calls = assistant(None, [("add", '{"a": 2}')])
    server = ChatServer(
        lambda request: calls if len(request["messages"]) == 1 else assistant("3"),
        429,
        headers="Retry-After: 0\r\n",
    )
    played = await episode(server, settings=ChatSettings("m", prices=Prices(2.5, 10.0, 1.25)))
    per_turn = (20 - 8) * 2.5 + 8 * 1.25 + 5 * 10.0
    assert played.usage == Usage(40, 10, 16, 4, pytest.approx(2 * per_turn / 1e6))
    assert played.counts == {"chat/requests": 3, "chat/retries": 1, "tool_calls": 1}


async def test_a_turn_without_usage_is_counted_as_uncounted():
    played = await episode(ChatServer(lambda request: assistant("3"), reply(assistant("3"), usage=None)))
    assert played.counts == {"chat/requests": 1, "chat/uncounted": 1}


@pytest.mark.parametrize("setting", ["keep", "drop"])
@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_parsed_and_sent_back_under_keep(setting, field):
    thought = assistant(None, [("add", '{"a": 2}')], **{field: "two and one"})
    server = ChatServer(lambda request: thought if len(request["messages"]) == 1 else assistant("3"))
    played = await episode(server, settings=ChatSettings("m", reasoning=setting))
    assert played.turns[0].action.reasoning == "two and one"
    sent = server.requests[1]["messages"][1]
    assert sent.get(field) == ("two and one" if setting == "keep" else None)


@pytest.mark.parametrize(
    ("setting", "sent"), [("keep", "<think>two and one</think>\n\nSo."), ("drop", "So.")]
)
async def test_reasoning_in_the_content_is_sent_back_under_keep(setting, sent):
    thought = assistant("<think>two and one</think>\n\nSo.", [("add", '{"a": 2}')])
    server = ChatServer(lambda request: thought if len(request["messages"]) == 1 else assistant("3"))
    played = await episode(server, settings=ChatSettings("m", reasoning=setting))
    assert (played.turns[0].action.reasoning, played.turns[0].action.text) == ("two and one", "So.")
    assert server.requests[1]["messages"][1]["content"] == sent


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('{"a": 2', "add: the arguments are no JSON"),
        ("[2]", "add: the arguments must be a JSON object, not '[2]'."),
        ("null", "add: the arguments must be a JSON object"),
        ("[" * 100_000, "add: the arguments are no JSON (nested too deep)"),
    ],
)
async def test_broken_arguments_are_a_sentence_for_the_model_and_sent_back_as_json(arguments, error):
    broken = assistant(None, [("add", arguments)])
    server = ChatServer(lambda request: broken if len(request["messages"]) == 1 else assistant("3"))
    played = await episode(server)
    (wrong,) = played.turns[0].action.tool_calls
    assert wrong.arguments is None
    assert wrong.raw == arguments
    assert wrong.error.startswith(error)
    sent = server.requests[1]["messages"]
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"unreadable": arguments}
    assert sent[2] == {"role": "tool", "tool_call_id": "call_0_add", "content": wrong.error}
    assert played.counts["malformed_calls"] == 1
    assert played.step_rewards == (None, 1.0)


async def test_calls_get_distinct_ids():
    function = {"name": "echo", "arguments": '{"text": "x"}'}
    calls = [{"id": "same", "function": function}, {"id": "same", "function": function}]
    calls += [{"function": {"arguments": "{}"}}, "nonsense", {"function": {"name": "a b", "arguments": {}}}]
    odd = assistant(None) | {"tool_calls": calls}
    server = ChatServer(lambda request: odd if len(request["messages"]) == 1 else assistant("3"))
    played = await episode(server)
    calls = played.turns[0].action.tool_calls
    assert len({call.id for call in calls}) == len(calls) == 5
    assert calls[4] == ToolCall("a b", {}, id="call_4")
    sent = server.requests[1]["messages"]
    assert [call["function"]["name"] for call in sent[1]["tool_calls"]] == [
        "echo",
        "echo",
        "unnamed",
        "unnamed",
        "a_b",
    ]
    assert [result["tool_call_id"] for result in sent[2:]] == [call.id for call in calls]
    assert [result["content"] for result in sent[2:4]] == ["x", "x"]
    assert "names no tool" in sent[4]["content"]
    assert (played.counts["malformed_calls"], played.counts["unknown_tools"]) == (2, 1)


@pytest.mark.parametrize("blank", ["", " ", None])
async def test_missing_arguments_are_an_empty_object(blank):
    without_arguments = assistant(None) | {
        "tool_calls": [{"id": "c", "function": {"name": "echo", "arguments": blank}}]
    }
    played = await episode(
        ChatServer(lambda request: without_arguments if len(request["messages"]) == 1 else assistant("3"))
    )
    assert played.turns[0].action.tool_calls == (ToolCall("echo", {}, id="c"),)
    assert played.counts["rejected_calls"] == 1


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (assistant("3"), "3"),
        (assistant(None), ""),
        (assistant(None, refusal="I can't."), "I can't."),
        ({"role": "assistant"}, ""),
        (assistant([{"type": "text", "text": "3"}, {"type": "text", "text": "!"}, 7]), "3!"),
        (assistant("half \ud800 a pair"), "half ? a pair"),
    ],
)
async def test_content_of_any_form_is_the_answer(message, content):
    played = await episode(ChatServer(lambda request: message))
    assert played.turns[-1].action == Message("assistant", content)
    assert played.step_rewards == (float(content == "3"),)
    assert played.counts.get("chat/refusals", 0) == int(content == "I can't.")


@pytest.mark.parametrize(
    ("behaviour", "counted"),
    [
        (reply(assistant("thr"), "length"), "chat/length"),
        (reply(assistant(None, [("add", '{"a"')]), "length"), "chat/length"),
        (reply(assistant(None), "content_filter"), "chat/content_filter"),
        ((400, refusal("too much", "context_length_exceeded")), "chat/context_full"),
        (
            (400, refusal("The input (9 tokens) is longer than the model's context length")),
            "chat/context_full",
        ),
    ],
)
async def test_a_turn_that_was_cut_truncates_the_episode_and_is_scored(behaviour, counted):
    env = Talk()
    played = await episode(ChatServer(lambda request: assistant("x"), behaviour), env)
    assert played.ending is Ending.TRUNCATED
    assert played.failure is None
    assert played.counts[counted] == 1
    assert env.actions == [], "the environment never receives an unfinished message"


async def test_an_episode_is_cut_at_its_limit_of_tokens():
    def env(max_tokens):
        talk = Talk()
        talk.limits = Limits(max_turns=4, max_tokens=max_tokens)
        return talk

    def usage(request):
        turns = sum(message["role"] == "assistant" for message in request["messages"]) + 1
        return reply(assistant("x"), usage={"prompt_tokens": 10 * turns, "completion_tokens": 5})

    for max_tokens, turns, requested in (
        (100, 4, [100, 85, 75, 65]),
        (24, 2, [24, 9]),
        (15, 2, [15]),
        (14, 1, [14]),
    ):
        server = ChatServer()
        server.play = lambda request: None
        server.behaviours = [usage({"messages": [{"role": "assistant"}] * n}) for n in range(4)]
        played = await episode(server, env(max_tokens))
        assert [request["max_tokens"] for request in server.requests] == requested
        assert (len(played.turns), played.ending) == (turns, Ending.TRUNCATED)


async def test_a_history_replaces_the_conversation():
    history = Step.restarted(
        Message("system", "Be brief."),
        Message("user", "What was it?"),
        Message("assistant", tool_calls=(ToolCall("echo", {"text": "b"}), ToolCall("echo", {"text": "c"}))),
        Message("tool", "b"),
        reason=Restart.COMPACTED,
    )
    server = ChatServer()
    played = await episode(server, Talk(steps=[history, Step.finished(reward=1.0)]))
    assert [trajectory.reason for trajectory in played.trajectories] == [None, Restart.COMPACTED]
    messages = server.requests[1]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool"]
    ids = [call["id"] for call in messages[2]["tool_calls"]]
    assert [message["tool_call_id"] for message in messages[3:]] == ids
    assert [message["content"] for message in messages[3:]] == ["b", ""]
    assert len(set(ids)) == 2


async def test_a_history_at_the_beginning_is_no_restart():
    class Rewritten(Talk):
        async def reset(self, task, *, seed):
            return History(task.prompt, Restart.REWRITTEN), {}

    played = await episode(ChatServer(), Rewritten(steps=[Step.finished(reward=1.0)]))
    assert len(played.trajectories) == 1


async def test_every_call_gets_one_result_and_other_results_become_user_messages():
    two = assistant(None, [("echo", "{}"), ("add", "{}")])
    steps = [Step.going(Message("tool", "early")), Step.going(Message("tool", "late"), Message("user", "u"))]
    server = ChatServer(lambda request: two if len(request["messages"]) == 1 else assistant("x"))
    await episode(server, Talk(steps=[*steps, Step.finished(reward=0.0)]))
    sent = [(m["role"], m.get("tool_call_id"), m["content"]) for m in server.requests[-1]["messages"]]
    assert sent[2:] == [
        ("tool", "call_0_echo", "early"),
        ("tool", "call_1_add", ""),
        ("assistant", None, "x"),
        ("user", None, "late"),
        ("user", None, "u"),
    ]


async def test_agents_share_connections_up_to_the_limit_of_requests():
    server = ChatServer(lambda request: assistant("3"))
    server.gate.clear()
    async with agents(server, max_requests=3) as agent:
        playing = [asyncio.create_task(play(Parrot(), agent(), ASK)) for _ in range(9)]
        while server.counts["running"] < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        server.gate.set()
        assert all(played.step_rewards == (1.0,) for played in await asyncio.gather(*playing))
    assert server.max_running == 3
    assert server.counts["connections"] <= 3
    assert server.counts["requests"] == 9


async def test_cancelling_closes_the_socket_and_leaves_no_task():
    server = ChatServer(lambda request: assistant("3"), "hang")
    before = asyncio.all_tasks()
    async with agents(server) as agent:
        playing = asyncio.create_task(play(Parrot(), agent(), ASK))
        await server.arrived.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await asyncio.wait_for(server.closed.wait(), 10)
        assert server.counts["requests"] == 1
        assert (await play(Parrot(), agent(), ASK)).step_rewards == (1.0,), "other episodes are not affected"
    assert asyncio.all_tasks() <= before
