"""An environment that is served by OpenEnv's protocol: sessions, errors, limits, and what stays behind."""

from __future__ import annotations

import asyncio
import json

import httpx2
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from agentrl import Limits, UserError, call, play
from agentrl.envs.agents import ScriptedAgent
from agentrl.envs.openenv import OpenEnv, client
from agentrl.envs.openenv.sessions import ServedWorld, action_schema
from agentrl.tools.intake import check_parameters
from agentrl.tools.mcp import McpTools
from agentrl.types.seams import ToolSchema
from envs_contrib.calculator import Calculator
from tests.envs.openenv.served import Adding, serving, session, until

KEY = "a-key-of-these-tests"


@pytest.fixture(autouse=True)
def _nothing_of_another_test():
    client._forms.clear()
    Adding.open_.clear()
    Adding.hanging = asyncio.Event()
    yield
    assert not Adding.open_


async def post(url, body, **headers):
    async with httpx2.AsyncClient(trust_env=False) as http:
        return await http.post(
            url, content=json.dumps(body), headers={"content-type": "application/json", **headers}
        )


async def rpc(url, method, **params):
    reply = await post(f"{url}/mcp", {"jsonrpc": "2.0", "id": 7, "method": method, "params": params})
    body = reply.json()
    assert (body["jsonrpc"], body["id"]) == ("2.0", 7)
    return body.get("result") or body["error"]


async def test_a_session_plays_episodes_with_instances_of_their_own():
    async with serving() as (sessions, url), session(url) as one, session(url) as other:
        first = await one.ask("reset", seed=7)
        assert first["type"] == "observation"
        assert first["data"]["observation"]["text"] == "What is 2 + 1?"
        assert first["data"]["observation"]["messages"] == [{"role": "user", "content": "What is 2 + 1?"}]
        assert (first["data"]["reward"], first["data"]["done"]) == (None, False)
        await other.ask("reset", seed=0, episode_id="mine")
        assert len(Adding.open_) == len(sessions) == 2
        called = await one.ask("step", type="call_tool", tool_name="add", arguments={"a": 2, "b": 1})
        observation = called["data"]["observation"]
        assert (observation["text"], observation["tool_name"], observation["result"]) == ("3", "add", "3")
        said = await one.ask("step", message="3")
        assert (said["data"]["reward"], said["data"]["done"]) == (1.0, True)
        assert said["data"]["metadata"] == {"terminated": True, "truncated": False}
        # Its instance is closed with its episode, and not with its session.
        assert len(Adding.open_) == 1
        state = (await one.ask("state"))["data"]
        assert (state["task"], state["step_count"], state["total_reward"]) == ("train-2", 2, 1.0)
        assert (await other.ask("state"))["data"]["episode_id"] == "mine"
        assert "send a reset" in (await one.ask("step", message="3"))["data"]["message"]
        again = await one.ask("reset", task="test-1", split="test")
        assert again["data"]["observation"]["text"] == "What is 1 + 1?"
        assert again["data"]["metadata"] == {"task": "test-1", "split": "test"}
    assert not len(sessions)


async def test_max_turns_truncate_an_episode():
    async with serving() as (_, url), session(url) as one:
        await one.ask("reset", seed=0)
        calls = [
            await one.ask("step", type="call_tool", tool_name="add", arguments={"a": n, "b": 1})
            for n in range(4)
        ]
        assert [reply["data"]["done"] for reply in calls] == [False, False, False, True]
        assert calls[-1]["data"]["metadata"] == {"terminated": False, "truncated": True}


INVALID = {
    "no JSON": ("{", "INVALID_JSON"),
    "a list": ("[]", "INVALID_JSON"),
    "many values": (
        json.dumps({"type": "step", "data": {"arguments": {"x": [1] * 250_000}}}),
        "INVALID_JSON",
    ),
    "another type": ('{"type": "fly"}', "UNKNOWN_TYPE"),
    "no type": ("{}", "UNKNOWN_TYPE"),
    "data is a text": ('{"type": "step", "data": "x"}', "VALIDATION_ERROR"),
    "an unknown field": ('{"type": "step", "data": {"guess": 1}}', "VALIDATION_ERROR"),
    "a wrong field": ('{"type": "step", "data": {"message": 1}}', "VALIDATION_ERROR"),
    "another action": ('{"type": "step", "data": {"type": "fly"}}', "VALIDATION_ERROR"),
    "a call of nothing": ('{"type": "step", "data": {"type": "call_tool"}}', "VALIDATION_ERROR"),
    "a tool that is said": ('{"type": "step", "data": {"tool_name": "add"}}', "VALIDATION_ERROR"),
    "a negative seed": ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
    "a seed that is true": ('{"type": "reset", "data": {"seed": true}}', "VALIDATION_ERROR"),
    "a long id": (json.dumps({"type": "reset", "data": {"episode_id": "x" * 256}}), "VALIDATION_ERROR"),
    "no such split": ('{"type": "reset", "data": {"split": "dev"}}', "VALIDATION_ERROR"),
    "no such task": ('{"type": "reset", "data": {"task": "train-9"}}', "VALIDATION_ERROR"),
    "no such number": ('{"type": "reset", "data": {"task": 5}}', "VALIDATION_ERROR"),
    "no episode": ('{"type": "step", "data": {"message": "x"}}', "EXECUTION_ERROR"),
}


async def test_what_is_invalid_is_answered_and_the_session_goes_on():
    async with serving() as (_, url), session(url) as one:
        for text, code in INVALID.values():
            reply = await one.raw(text)
            assert (reply["type"], reply["data"]["code"]) == ("error", code), text[:80]
            assert reply["data"]["message"]
            for error in reply["data"].get("errors", ()):
                assert all(error[key] for key in ("loc", "msg")), text[:80]
        assert (await one.ask("reset", seed=0))["type"] == "observation"


async def test_a_full_server_refuses_as_openenv_does_and_takes_another_one_when_a_place_is_free():
    async with serving(most=1) as (sessions, url):
        async with session(url), session(url) as refused:
            reply = await refused.read()
            assert reply["data"]["code"] == "CAPACITY_REACHED"
            assert (reply["data"]["active_sessions"], reply["data"]["max_sessions"]) == (1, 1)
            with pytest.raises(ConnectionClosed):
                await refused.ask("state")
            assert "at capacity" in (await rpc(url, "openenv/session/create"))["message"]
        await until(lambda: not len(sessions))
        async with session(url) as one:
            assert (await one.ask("reset"))["type"] == "observation"


class Patient(Adding):
    """No deadline of it ends what its client has left behind."""

    limits = Limits(max_turns=4)


async def test_a_client_that_goes_ends_its_work_and_leaves_nothing():
    async with serving(Patient) as (sessions, url):
        for is_working in (False, True):
            async with session(url) as one:
                await one.ask("reset", seed=0)
                if is_working:
                    call = {"type": "call_tool", "tool_name": "hang"}
                    await one.socket.send(json.dumps({"type": "step", "data": call}))
                    await asyncio.wait_for(Adding.hanging.wait(), 10)
                one.socket.transport.abort()
            await until(lambda: not len(sessions) and not Adding.open_)


class Stuck(Adding):
    """Its step takes for ever where the agent says so."""

    async def step(self, action):
        if action.text == "hang":
            await asyncio.sleep(3600)
        return await super().step(action)


async def test_a_step_that_overruns_or_fails_ends_its_episode_alone():
    async with serving(Stuck) as (_, url), session(url) as one, session(url) as other:
        await other.ask("reset", seed=1)
        failing = {"type": "call_tool", "tool_name": "fail"}
        for action, reason in (
            (failing, "the disk is gone"),
            ({"message": "hang"}, "took longer than 0.5 s"),
        ):
            await one.ask("reset", seed=0)
            reply = await one.ask("step", **action)
            assert reply["data"]["code"] == "EXECUTION_ERROR"
            assert reason in reply["data"]["message"]
            assert len(Adding.open_) == 1
            assert (await one.ask("step", message="1"))["data"]["code"] == "EXECUTION_ERROR"
        said = await other.ask("step", message="2")
        assert said["data"]["reward"] == 1.0


async def test_mistakes_of_a_model_are_text_and_no_errors():
    async with serving() as (_, url), session(url) as one:
        await one.ask("reset", seed=0)
        for action in (
            {"tool_name": "add", "arguments": {"a": "x"}},
            {"tool_name": "fly"},
            {"tool_name": "hang"},
        ):
            reply = await one.ask("step", type="call_tool", **action)
            assert (reply["type"], reply["data"]["done"]) == ("observation", False)
            assert reply["data"]["observation"]["text"]
        assert (await one.ask("step", message="1"))["data"]["reward"] == 1.0


async def test_a_session_that_rests_ends():
    async with serving(idle_s=0.7) as (sessions, url):
        await rpc(url, "openenv/session/create")
        async with session(url) as one, session(url) as busy:
            await busy.ask("reset", seed=0)
            await one.ask("reset", seed=0)
            for _ in range(10):
                await asyncio.sleep(0.1)
                await busy.ask("state")
            with pytest.raises(ConnectionClosed) as closed:
                await one.ask("state")
            assert closed.value.rcvd.code == 1001
        await until(lambda: not len(sessions))


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
async def test_whoever_lacks_the_key_or_comes_from_a_web_page_gets_no_session(path):
    async with serving(key=KEY) as (sessions, url):
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer other"}, 401),
            ({"Authorization": f"Bearer {KEY}", "Origin": "https://www.w3.org"}, 403),
        ):
            with pytest.raises(InvalidStatus) as refused:
                async with session(url, path, **headers):
                    raise AssertionError("it is refused")
            assert refused.value.response.status_code == status
        async with session(url, path, Authorization=f"Bearer {KEY}"):
            assert len(sessions) == 1
        async with httpx2.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{url}/health")).status_code == 200
            for name in ("/schema", "/metadata", "/list_environments"):
                assert (await http.get(f"{url}{name}")).status_code == 401
                known = await http.get(f"{url}{name}", headers={"Authorization": f"Bearer {KEY}"})
                assert known.status_code == 200
        assert (await post(f"{url}/mcp", {})).status_code == 401


async def test_tools_are_called_over_mcp_in_a_session_that_a_websocket_may_attach_to():
    async with serving() as (sessions, url):
        listed = await rpc(url, "tools/list")
        assert [tool["name"] for tool in listed["tools"]] == ["add", "hang", "fail"]
        assert listed["tools"][0]["inputSchema"]["required"] == ["a", "b"]
        assert (await rpc(url, "tools/call", name="add"))["code"] == -32602
        id = (await rpc(url, "openenv/session/create"))["session_id"]
        async with session(url, f"/ws?session_id={id}") as one:
            await one.ask("reset", seed=0)
            called = await rpc(url, "tools/call", session_id=id, name="add", arguments={"a": 0, "b": 1})
            assert (called["data"], called["content"][0]["text"]) == ("1", "1")
            async with session(url, f"/ws?session_id={id}") as second:
                assert "already has an attached" in (await second.read())["data"]["message"]
            # A client closes its WebSocket and asks for the end at once, which the server may hear first.
            closing = {"session_id": id, "closed": False, "closing": True}
            assert (await rpc(url, "openenv/session/close", session_id=id)) == closing
            assert (await one.ask("step", message="1"))["data"]["reward"] == 1.0
        await until(lambda: not len(sessions))
        other = (await rpc(url, "openenv/session/create"))["session_id"]
        assert (await rpc(url, "openenv/session/close", session_id=other)) == {
            "session_id": other,
            "closed": True,
        }
        assert (await rpc(url, "openenv/session/close", session_id=id))["code"] == -32602
        assert (await rpc(url, "fly"))["code"] == -32601
        assert (await post(f"{url}/mcp", [])).json()["error"]["code"] == -32700
        async with session(url, "/mcp") as one:
            assert (await one.rpc("initialize"))["instructions"].startswith("What is")
            assert (await one.rpc("tools/call", name="add", arguments={"a": 1, "b": 1}))["data"] == "2"


async def test_a_client_of_mcp_calls_the_tools_and_ends_its_session():
    async with serving() as (sessions, url):
        async with McpTools(url=f"{url}/mcp").episode() as tools:
            add, *_ = tools
            assert [tool.name for tool in tools] == ["add", "hang", "fail"]
            assert len(sessions) == len(Adding.open_) == 1
            assert await add.invoke({"a": 2, "b": 3}) == "5"
        await until(lambda: not len(sessions))


async def test_the_tasks_are_shown_without_their_answers():
    async with serving() as (_, url):
        async with httpx2.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{url}/Adding-v0/splits")).json()[1] == {"name": "test", "type": "test"}
            assert (await http.get(f"{url}/Other-v0/splits")).status_code == 404
        assert (await post(f"{url}/Adding-v0/num_tasks", {"split": "test"})).json() == {"num_tasks": 3}
        one = (await post(f"{url}/Adding-v0/task", {"split": "test", "index": 2})).json()["task"]
        assert one == {"id": "test-2", "index": 2, "split": "test", "prompt": "What is 2 + 1?"}
        some = await post(f"{url}/Adding-v0/task_range", {"split": "train", "start": 3})
        assert [task["id"] for task in some.json()["tasks"]] == ["train-3", "train-4"]
        for body in ({"split": "test", "index": 3}, {"split": "dev", "index": 0}, {"split": "test"}):
            assert (await post(f"{url}/Adding-v0/task", body)).status_code == 400


def test_the_schema_of_actions_is_one_that_clients_can_offer_and_names_the_tools():
    schema = action_schema(Adding().tool_schemas)
    check_parameters(ToolSchema("act", "", schema))
    assert schema["properties"]["tool_name"]["enum"] == ["", "add", "hang", "fail"]
    assert '"required": ["a", "b"]' in schema["properties"]["arguments"]["description"]


def test_a_split_that_does_not_exist_is_refused_before_anything_is_served():
    with pytest.raises(UserError, match="no split `dev`"):
        ServedWorld(Adding, "dev")


async def test_our_own_client_plays_the_expert_of_a_served_environment():
    async with serving(Calculator) as (_, url):
        env = OpenEnv(url, text="text", answer="message")
        tasks = Calculator().tasks("train")
        for number in range(6):
            expert = ScriptedAgent(Calculator().expert(tasks[number]))
            episode = await play(env, expert, env.tasks("train")[number])
            assert (episode.ending, episode.total_of()) == ("completed", 1.0), episode.failure
            assert [tool.name for tool in env.tool_schemas] == ["calc"]
            assert episode.counts.get("invalid_moves", 0) == 0
            env = OpenEnv(url, text="text", answer="message")


async def test_an_episode_waits_for_a_place_of_a_full_server_and_fails_where_none_comes(monkeypatch):
    async def played(url):
        env = OpenEnv(url, text="text", answer="message")
        script = (call("add", a=0, b=1) for _ in "1")
        return await play(env, ScriptedAgent(script), env.tasks("train")[0])

    async with serving(most=1) as (sessions, url):
        holder = sessions.open()
        waiting = asyncio.create_task(played(url))
        await asyncio.sleep(0.7)
        assert not waiting.done()
        await sessions.close(holder)
        assert (await waiting).failure is None
        sessions.open()
        monkeypatch.setattr(client, "_MOST_WAIT_S", 0.2)
        failure = (await played(url)).failure
        assert (failure.stage, failure.kind) == ("reset", "unavailable")
        assert "CAPACITY_REACHED" in failure.detail
