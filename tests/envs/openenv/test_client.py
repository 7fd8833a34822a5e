"""OpenEnv servers: sessions over WebSockets, refused actions, failures of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

from agentrl import ScriptedAgent, UserError, call, play, say
from agentrl.envs.openenv import OpenEnv

SCHEMA = {
    "type": "object",
    "description": "Guess a number.",
    "additionalProperties": False,
    "properties": {
        "metadata": {"type": "object", "additionalProperties": True},
        "guess": {"type": "integer"},
    },
    "required": ["guess"],
}


async def session(websocket):
    """One session of the guessing game, in the protocol of openenv-core."""
    await websocket.accept()
    secret = 0
    with contextlib.suppress(Exception):
        while True:
            message = json.loads(await websocket.receive_text())
            data = message["data"]
            if message["type"] == "reset":
                secret = data["seed"] % 10
                reply = observation("guess", None, False)
            elif not isinstance(data.get("guess"), int):
                errors = [{"loc": ["guess"], "msg": "Input should be a valid integer"}]
                reply = failure("VALIDATION_ERROR", "Invalid message", errors=errors)
            elif data["guess"] == 99:
                reply = failure("EXECUTION_ERROR", "broken")
            elif data["guess"] == 98:
                await websocket.close()
                return
            else:
                guess = data["guess"]
                hint = "right" if guess == secret else "higher" if secret > guess else "lower"
                reply = observation(hint, float(guess == secret), guess == secret)
            await websocket.send_text(json.dumps(reply))


def observation(hint, reward, done):
    data = {"observation": {"hint": hint}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def failure(code, message, **more):
    return {"type": "error", "data": {"message": message, "code": code, **more}}


async def schema(request):
    return JSONResponse({"action": SCHEMA, "observation": {}, "state": {}})


@pytest.fixture
async def url():
    app = Starlette(routes=[Route("/schema", schema), WebSocketRoute("/ws", session)])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    # It would restore the handler of an event loop that has ended by then.
    server.capture_signals = contextlib.nullcontext
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


def bisecting():
    low, high = 0, 9
    hint = ""
    while hint != "right":
        guess = (low + high) // 2
        hint = yield call("act", guess=guess)
        low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)


async def played(url, script, number=7, **named):
    env = OpenEnv(url, rules="Guess a digit.", text="hint", **named)
    return await play(env, ScriptedAgent(script), env.tasks("train")[number])


async def solves_refuses_and_fails(url):
    """What every server of the guessing game has to do."""
    episodes = await asyncio.gather(*(played(url, bisecting(), number) for number in range(6)))
    assert [(episode.ending, episode.total_of()) for episode in episodes] == [("completed", 1.0)] * 6
    first = episodes[0].turns[0].observation
    assert [message.text for message in first] == ["Guess a digit.", "guess"]

    def wrong():
        assert "call `act`" in (yield say("hello"))
        assert "guess: Input should be a valid integer" in (yield call("act", guess="many"))
        assert "There is no tool 'fly'" in (yield call("fly", guess=1))
        yield call("act", guess=7)

    episode = await played(url, wrong())
    assert (episode.ending, episode.total_of(), episode.counts["invalid_moves"]) == ("completed", 1.0, 3)
    episode = await played(url, (call("act", guess=99) for _ in "1"))
    assert (episode.failure.stage, episode.failure.kind) == ("step", "error")
    assert "broken" in episode.failure.detail


async def test_episodes_are_sessions_of_their_own_and_only_the_servers_faults_fail(url):
    await solves_refuses_and_fails(url)


async def test_the_tool_has_the_arguments_of_the_servers_schema(url):
    env = OpenEnv(url)
    assert env.tool_schemas == ()
    await env.reset(env.tasks("test")[0], seed=0)
    (act,) = env.tool_schemas
    assert act.description == "Guess a number."
    assert set(act.parameters["properties"]) == {"guess"}
    await env.close()


async def test_a_lost_connection_and_a_missing_server_are_failures_of_the_episode(url):
    episode = await played(url, (call("act", guess=98) for _ in "1"))
    assert (episode.failure.stage, episode.failure.kind) == ("step", "unavailable")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}"
    episode = await played(nowhere, bisecting())
    assert (episode.failure.stage, episode.failure.kind) == ("reset", "unavailable")


def test_an_address_without_a_scheme_is_a_one_sentence_error():
    with pytest.raises(UserError, match=r"the url of an OpenEnv server is like .*, got .127"):
        OpenEnv("127.0.0.1:8000")
