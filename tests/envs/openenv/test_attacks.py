"""A hostile OpenEnv server: where it redirects to, what holds the event loop, and what is no reply."""

from __future__ import annotations

import json
import re

import pytest
from websockets.client import ClientProtocol

from agentrl import ScriptedAgent, call, play
from agentrl.envs.openenv import OpenEnv
from agentrl.envs.openenv import client as openenv
from agentrl.errors import StageError
from tests.hostile import attacking, frame, measured, redirected, replied

SCHEMA = {"action": {"type": "object", "properties": {"guess": {"type": "integer"}}}}
OBSERVATION = {"type": "observation", "data": {"observation": {"hint": "go"}, "reward": None, "done": False}}
MIB = 1 << 20
MAX_STEP_S = 0.5


@pytest.fixture(autouse=True)
def _no_schema_of_another_test():
    openenv._forms.clear()


def serving(frames, schema=SCHEMA):
    """A server with a schema, and the frames of its WebSocket in answer to each message."""

    def answer(path, body):
        return None if path == "/ws" else replied(json.dumps(schema).encode())

    return attacking(answer, frames)


async def begun(url, **settings):
    env = OpenEnv(url, **settings)
    try:
        observation, _ = await env.reset(env.tasks("train")[0], seed=0)
        return observation[-1].content
    finally:
        await env.close()


async def refused(url, kind):
    with pytest.raises(StageError) as caught:
        await begun(url)
    assert (caught.value.stage, caught.value.kind) == ("reset", kind)
    assert len(caught.value.detail) < 500
    assert caught.value.detail.isprintable()
    return caught.value.detail


@pytest.mark.parametrize("path", ["/schema", "/ws"])
@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_redirect_to_another_origin_is_refused(path, scheme):
    with attacking(lambda path, body: replied(b"{}")) as other:

        def answer(asked, body):
            target = f"{other.url.replace('http', scheme)}{path}"
            return redirected(target) if asked == path else replied(json.dumps(SCHEMA).encode())

        with attacking(answer) as server:
            # By a redirect to `http`, a WebSocket leads nowhere.
            kind = "unavailable" if (path, scheme) == ("/ws", "http") else "refused"
            assert server.url in (await refused(server.url, kind)).replace("ws://", "http://")
    assert other.requests == []


async def test_a_redirect_within_the_origin_is_followed():
    def answer(path, body):
        if path in ("/schema", "/ws"):
            return redirected(f"/moved{path}")
        return None if path == "/moved/ws" else replied(json.dumps(SCHEMA).encode())

    with attacking(answer, lambda message: [frame(json.dumps(OBSERVATION).encode())]) as server:
        assert await begun(server.url, text="hint") == "go"


async def test_no_proxy_of_the_environment_is_used(monkeypatch):
    with attacking(lambda path, body: replied(b"{}")) as proxy:
        for name in ("http_proxy", "ws_proxy", "socks_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        with serving(lambda message: [frame(json.dumps(OBSERVATION).encode())]) as server:
            assert await begun(server.url, text="hint") == "go"
    assert proxy.requests == []


def wrapped(observation: bytes) -> bytes:
    return b'{"type":"observation","data":{"done":false,"observation":' + observation + b"}}"


FLOODS = {
    "small lists, 15 MB": (wrapped(b"[" + b"[]," * 5_000_000 + b"1]"), "holds more than 200,000 values"),
    "strings, 15 MB": (wrapped(b"[" + b'"",' * 5_000_000 + b"1]"), "holds more than 200,000 values"),
    "keys, 15 MB": (wrapped(b"{" + b'"a":1,' * 2_500_000 + b'"b":1}'), "holds more than 200,000 values"),
    "digits": (wrapped(b"[" + b"9" * 4_000 + b"]" + b" " * 70_000), "the reply is no JSON"),
    "brackets": (b"[" * 100_000, "the reply is no JSON"),
    "17 MB": (wrapped(b'"' + b"x" * 17 * MIB + b'"'), "frame"),
    "UTF-16": (wrapped(b'"a"').decode().encode("utf-16"), "the reply is no JSON"),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_is_refused_before_it_is_parsed(name, monkeypatch):
    text, sentence = FLOODS[name]
    with serving(lambda message: [frame(text)]) as server, measured(monkeypatch) as cost:
        detail = await refused(server.url, "unavailable" if name == "17 MB" else "protocol")
    assert sentence in detail
    assert cost.longest_s < MAX_STEP_S


@pytest.mark.parametrize("opcode", [9, 10])
async def test_frames_without_a_message_do_not_hold_the_event_loop(opcode, monkeypatch):
    sizes, receive = [], ClientProtocol.receive_data

    def counted(protocol, data):
        sizes.append(len(data))
        receive(protocol, data)

    monkeypatch.setattr(ClientProtocol, "receive_data", counted)
    flood = [frame(b"", opcode) * 300_000, frame(json.dumps(OBSERVATION).encode())]
    with serving(lambda message: flood) as server:
        assert await begun(server.url, text="hint") == "go"
    # What arrives is handled in small parts, between which others have their turns: 256 KiB take a second.
    assert sum(sizes) > 600_000
    assert max(sizes) <= 8_192


async def test_a_long_observation_arrives_as_it_is(monkeypatch):
    text = "ä\\n" * MIB
    reply = frame(wrapped(f'"{text}"'.encode()))
    with serving(lambda message: [reply]) as server, measured(monkeypatch) as cost:
        assert await begun(server.url) == "ä\n" * MIB
    assert cost.longest_s < MAX_STEP_S


DATA = OBSERVATION["data"]
MALFORMED = {
    "no JSON": (b"{", "the reply is no JSON"),
    "no UTF-8": (b'"\xff"', "the reply is no JSON"),
    "a list": ([1], "the reply is no object with a `type` and an object `data`"),
    "no data": ({"type": "observation"}, "the reply is no object with a `type` and an object `data`"),
    "data is a text": ({"type": "observation", "data": "x"}, "an object `data`"),
    "another type": ({"type": "state", "data": {}}, "the reply has the type state"),
    "a type that is a list": ({"type": ["\x1b[2J"], "data": {}}, r'the reply has the type ["\u001b[2J"]'),
    "no observation": ({"type": "observation", "data": {"done": True}}, "the reply holds no `observation`"),
    "done is a text": ({"type": "observation", "data": {**DATA, "done": "no"}}, "`done` of the reply is no,"),
    "no number": (
        {"type": "observation", "data": {**DATA, "reward": "1"}},
        "`reward` of the reply is 1, not",
    ),
    "NaN": (wrapped(b'1,"reward":NaN'), "`reward` of the reply is NaN, not a finite number"),
    "infinity": (wrapped(b'1,"reward":1e999'), "`reward` of the reply is Infinity, not a finite number"),
    "a huge number": (wrapped(b'1,"reward":1' + b"0" * 400), "`reward` of the reply is 1000"),
    "nested": (wrapped(b"[" * 500 + b"]" * 500), "nested too deep"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_no_reply_is_one_sentence(name):
    reply, sentence = MALFORMED[name]
    text = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    with serving(lambda message: [frame(text)]) as server:
        assert sentence in await refused(server.url, "protocol")


SCHEMAS = {
    "a list": [],
    "no action": {"observation": {}},
    "an action that is a text": {"action": "guess"},
    "properties that are a list": {"action": {"properties": ["guess"]}},
    "no schema": {"action": {"properties": {"guess": {"type": 7}}}},
    "no object": {"action": {"type": "array", "properties": {}}},
    "too large": {"action": {"properties": {f"p{n}": {} for n in range(20_000)}}},
}


@pytest.mark.parametrize("name", SCHEMAS)
async def test_what_describes_no_action_is_one_sentence(name):
    with serving(lambda message: [], SCHEMAS[name]) as server:
        assert f"{server.url}/schema: " in await refused(server.url, "protocol")


async def test_words_of_the_server_are_cut_and_printable():
    def frames(message):
        kind = json.loads(message)["type"]
        if kind == "reset":
            return [frame(wrapped(rb'{"hint":"half \ud800 of a pair"}'))]
        errors = [{"loc": ["x" * 9_000] * 9, "msg": "\x1b[2J" + "y" * 9_000}] * 9
        data = {"code": "VALIDATION_ERROR", "message": "no", "errors": errors}
        return [frame(json.dumps({"type": "error", "data": data}).encode())]

    shown = []

    def script():
        shown.append((yield call("act", guess=1)))
        yield call("act", guess="z")

    with serving(frames) as server:
        env = OpenEnv(server.url)
        await play(env, ScriptedAgent(script()), env.tasks("train")[0])
    (rejection,) = shown
    assert re.match(r"That is no action: x+\.\.\.: \[2Jy+\.\.\.; ", rejection)
    assert rejection.isprintable()
    assert len(rejection) < 1_500
    rejection.encode()
