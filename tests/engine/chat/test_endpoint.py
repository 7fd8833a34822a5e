"""The connection to a chat endpoint: retries, typed failures, redaction of the key."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import time
import traceback

import pytest

from agentrl import Task, play
from agentrl.engine.chat.agent import ChatAgent
from agentrl.engine.chat.endpoint import ChatEndpoint
from agentrl.engine.chat.settings import ChatSettings
from agentrl.errors import ConfigError, EndpointError
from agentrl.types import Ending
from tests.engine.chat.chat_server import ChatServer, assistant, refusal, reply
from tests.worlds import Parrot

KEY = "sk-very-secret-0123456789"
NOW = "Retry-After: 0\r\n"


@pytest.fixture
def quick(monkeypatch):
    """Short waits between retries, except those of Retry-After."""
    monkeypatch.setattr("agentrl.engine.chat.endpoint._FIRST_WAIT_S", 0.001)


async def turn(server, settings=None, **options):
    """One turn at a running server."""
    settings = settings or ChatSettings("m")
    endpoint = ChatEndpoint(url=server.url, **{"attempts": 2, "timeout_s": 20.0, **options})
    async with endpoint.connected() as connection:
        return await connection.complete(settings.request([{"role": "user", "content": "?"}], [], seed=1))


async def checked(server, **options):
    endpoint = ChatEndpoint(url=server.url, **{"attempts": 2, "timeout_s": 20.0, **options})
    async with endpoint.connected() as connection:
        await connection.check(ChatSettings("gpt-small"), Parrot().tool_schemas)


@pytest.mark.parametrize("transient", [408, 429, 500, 502, 503, 504, 529, "reset", "drop"])
async def test_transient_failures_are_retried(transient, quick):
    async with ChatServer(
        lambda request: assistant("yes"), transient, transient, headers=NOW
    ).serving() as server:
        completed = await turn(server, attempts=3)
    assert (completed.reply.message.content, completed.retries) == ("yes", 2)
    assert server.counts["requests"] == 3


@pytest.mark.parametrize(
    ("behaviour", "kind", "requests"),
    [
        *[(status, "unavailable", 2) for status in (408, 429, 502, 503, 529)],
        (500, "crashed", 2),
        *[(broken, "crashed", 2) for broken in ("drop", "reset")],
        ((429, refusal("You exceeded your current quota", "insufficient_quota")), "unavailable", 1),
        *[(status, "refused", 1) for status in (401, 403, 301, 307)],
        *[(status, "protocol", 1) for status in (400, 404, 422, 201)],
        *[(body, "protocol", 1) for body in (b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe")],
        *[({"choices": broken}, "protocol", 1) for broken in (None, [], [7], [{}], [{"message": "x"}], {})],
        (refusal("the upstream died"), "protocol", 1),
        (reply(assistant("x"), "error"), "protocol", 1),
        (reply(assistant("x"), "abort"), "protocol", 1),
    ],
)
async def test_every_failure_is_typed_and_fails_the_episode(behaviour, kind, requests, quick):
    server = ChatServer(lambda request: assistant("3"), *[behaviour] * requests, headers=NOW)
    endpoint_of = {"attempts": 2, "timeout_s": 20.0}
    async with (
        server.serving(),
        ChatEndpoint(url=server.url, **endpoint_of).connected() as connection,
    ):
        task = Task.ask("t", "How many are 2 and 1?", "3")
        failed = await play(Parrot(), ChatAgent(connection, ChatSettings("m")), task)
        assert (failed.ending, failed.step_rewards) == (Ending.FAILED, ())
        assert (failed.failure.stage, failed.failure.kind) == ("act", kind)
        assert failed.failure.detail.startswith(server.url)
        assert server.counts["requests"] == requests
        again = await play(Parrot(), ChatAgent(connection, ChatSettings("m")), task)
        assert again.step_rewards == (1.0,), "the next turn succeeds"


async def test_an_error_contains_the_message_of_the_server():
    async with ChatServer(None, (400, refusal("temperature must be\n\x1b[1m 1"))).serving() as server:
        with pytest.raises(EndpointError) as failed:
            await turn(server)
    assert str(failed.value) == (f"act protocol: {server.url} answered 400: temperature must be [1m 1")
    assert failed.value.status == 400


async def test_without_a_server_the_endpoint_is_unavailable(quick):
    async with ChatServer().serving() as server:
        pass
    with pytest.raises(EndpointError) as failed:
        await turn(server)
    assert failed.value.kind == "unavailable"


async def test_a_server_that_hangs_is_a_timeout():
    async with ChatServer(lambda request: assistant("yes"), "hang").serving() as server:
        with pytest.raises(EndpointError) as failed:
            await asyncio.wait_for(turn(server, timeout_s=0.2), 20)
        assert (failed.value.kind, failed.value.detail) == ("timeout", f"{server.url} gave no turn in 0.2 s")
        await asyncio.wait_for(server.closed.wait(), 10)


async def test_waiting_for_a_slot_does_not_count_as_the_timeout():
    server = ChatServer(lambda request: assistant("yes"), "hang")
    async with (
        server.serving(),
        ChatEndpoint(url=server.url, timeout_s=1.5, max_requests=1).connected() as connection,
    ):
        request = ChatSettings("m").request([{"role": "user", "content": "?"}], [], seed=1)
        turns = [connection.complete(request) for _ in range(2)]
        hung, answered = await asyncio.gather(*turns, return_exceptions=True)
    assert isinstance(hung, EndpointError)
    assert answered.reply.message.content == "yes"


@pytest.mark.parametrize("how", ["seconds", "date"])
async def test_retry_after_is_respected(how):
    async def waited(retry_after):
        async with ChatServer(None, 429, headers=f"Retry-After: {retry_after}\r\n").serving() as server:
            with pytest.raises(EndpointError) as failed:
                await turn(server, timeout_s=0.6)
        assert server.counts["requests"] == 1, "no request is sent before"
        assert failed.value.detail.endswith("gave no turn in 0.6 s; before that it answered 429: try again")

    await waited("30" if how == "seconds" else email.utils.formatdate(time.time() + 30, usegmt=True))


async def test_an_endless_reply_is_cut_off(monkeypatch):
    monkeypatch.setattr("agentrl.engine.chat.endpoint._MAX_REPLY_BYTES", 1000)
    async with ChatServer(None, b"[" * 2000).serving() as server:
        with pytest.raises(EndpointError, match="longer than 1,000 bytes"):
            await turn(server)


async def test_a_redirect_is_not_followed_anywhere():
    async with ChatServer().serving() as other:
        for target in (f"{other.url}/chat/completions", "/v1/chat/completions"):
            async with ChatServer(None, 307, headers=f"Location: {target}\r\n").serving() as server:
                with pytest.raises(EndpointError) as failed:
                    await turn(server, key=KEY)
            assert (failed.value.kind, failed.value.status) == ("refused", 307)
            assert server.counts["requests"] == 1
    assert other.counts["connections"] == 0


async def test_the_key_is_sent_as_a_bearer_token_and_none_where_there_is_none():
    async with ChatServer(key=KEY).serving() as server:
        assert (await turn(server, key=KEY)).reply.message.content == "ok"
    async with ChatServer().serving() as server:
        await turn(server)
        assert "authorization" not in server.heads[0].lower()


async def test_an_address_keeps_its_query_and_extends_its_path():
    endpoint = ChatEndpoint(url="http://127.0.0.1:1/openai/v1/?version=2")
    assert str(endpoint.address("models")) == "http://127.0.0.1:1/openai/v1/models?version=2"


@pytest.mark.parametrize("where", ["error", "content", "call", "text"])
async def test_a_key_that_a_server_repeats_is_redacted(where, caplog):
    caplog.set_level(logging.DEBUG)
    behaviour = {
        "error": (400, refusal(f"I know {KEY}!")),
        "text": (400, f"<html>{KEY}</html>".encode()),
        "content": reply(assistant(f"your key is {KEY}")),
        "call": reply(assistant(None, [("echo", f'{{"text": "{KEY}"}}')])),
    }[where]
    async with ChatServer(None, behaviour).serving() as server:
        if where in ("error", "text"):
            with pytest.raises(EndpointError, match=r"\*\*\*") as failed:
                await turn(server, key=KEY)
            output = "".join(traceback.format_exception(failed.value))
        else:
            output = repr(await turn(server, key=KEY))
            assert "***" in output
    assert KEY not in output
    assert KEY not in caplog.text
    assert KEY not in repr(ChatEndpoint(url=server.url, key=KEY))


async def test_a_placeholder_for_a_key_is_not_redacted():
    async with ChatServer(lambda request: assistant("the list is EMPTY")).serving() as server:
        assert (await turn(server, key="EMPTY")).reply.message.content == "the list is EMPTY"


@pytest.mark.parametrize("key", ["", " ", "two\nlines", "schlüssel", "blank "])
def test_an_invalid_key_is_refused_without_showing_it(key):
    with pytest.raises(ConfigError, match="variable MY_KEY holds no key") as refused:
        ChatEndpoint(url="http://127.0.0.1:1/v1", key=key, key_env="MY_KEY")
    assert not key.strip() or key not in str(refused.value)


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://127.0.0.1/v1", "http://127.0.0.1@127.0.0.1/v1"])
def test_an_invalid_address_is_refused(url):
    with pytest.raises(ConfigError, match="address"):
        ChatEndpoint(url=url)


@pytest.mark.parametrize("setting", ["timeout_s", "attempts", "max_requests"])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ConfigError, match="timeout_s above 0"):
        ChatEndpoint(url="http://127.0.0.1:1/v1", **{setting: 0})


async def test_the_check_requests_one_turn_with_the_tools():
    async with ChatServer(key=KEY, models=["gpt-small"]).serving() as server:
        await checked(server, key=KEY)
    (request,) = server.requests
    assert (request["model"], len(request["tools"])) == ("gpt-small", 2)


@pytest.mark.parametrize(
    ("server", "options", "sentence"),
    [
        (
            ChatServer(key=KEY),
            {"key": "wrong-key", "key_env": "K"},
            "put the right key into the environment variable K.",
        ),
        (ChatServer(key=KEY), {"key_env": "K"}, "put a key into the environment variable K."),
        (
            ChatServer(models=["gpt-smal", "large"]),
            {},
            "{url} has no model `gpt-small`. Did you mean `gpt-smal`? It has gpt-smal, large.",
        ),
        (
            ChatServer(None, (404, refusal("no such model."))),
            {},
            "answered 404: no such model; check openai_model, and openai_url, which usually ends in /v1.",
        ),
        (
            ChatServer(None, (400, refusal("No tools here")), models=["gpt-small"]),
            {},
            "answered 400: No tools here; change that with openai_body, or leave a field out with",
        ),
        (ChatServer(None, 301), {}, "redirects are not followed, so give the address that they lead to."),
        (
            ChatServer(None, (429, refusal("no money", "insufficient_quota"))),
            {},
            "{url} answered 429: no money; wait, or have your limits there raised.",
        ),
        (ChatServer(None, 503, 503, headers=NOW), {}, "check openai_url, and that the server there answers."),
        (ChatServer(None, b"<html>"), {}, "{url} failed: the reply is no JSON; check openai_url"),
    ],
)
async def test_a_mistake_of_configuration_is_a_one_line_error(server, options, sentence):
    server.requests.clear()
    async with server.serving():
        with pytest.raises(ConfigError) as raised:
            await checked(server, **options)
    message = str(raised.value)
    assert sentence.format(url=server.url) in message
    assert message.count("\n") == 0
    assert KEY not in message
