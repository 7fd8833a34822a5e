"""The connection to a chat endpoint: patient, typed where it fails, silent about the key."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import time
import traceback

import pytest

from agentrl import Task, play
from agentrl.errors import ConfigError, EndpointError
from agentrl.rollout.chat.agent import ChatAgent
from agentrl.rollout.chat.endpoint import ChatEndpoint
from agentrl.rollout.chat.settings import ChatSettings
from agentrl.types import Ending
from tests.rollout.chat.chat_server import ChatServer, refusal, reply, said
from tests.worlds import Parrot

KEY = "sk-very-secret-0123456789"
NOW = "Retry-After: 0\r\n"


@pytest.fixture
def quick(monkeypatch):
    """Waits of our own choosing are short; those that a server asks for are not."""
    monkeypatch.setattr("agentrl.rollout.chat.endpoint._FIRST_WAIT_S", 0.001)


async def turn(server, settings=None, **options):
    """One turn; the server serves already."""
    chosen = settings or ChatSettings("m")
    endpoint = ChatEndpoint(url=server.url, **{"attempts": 2, "timeout_s": 20.0, **options})
    async with endpoint.connected() as connection:
        return await connection.complete(chosen.request([{"role": "user", "content": "?"}], [], seed=1))


async def checked(server, **options):
    endpoint = ChatEndpoint(url=server.url, **{"attempts": 2, "timeout_s": 20.0, **options})
    async with endpoint.connected() as connection:
        await connection.check(ChatSettings("gpt-small"), Parrot().tool_schemas)


@pytest.mark.parametrize("passing", [408, 429, 500, 502, 503, 504, 529, "reset", "drop"])
async def test_what_passes_is_asked_again(passing, quick):
    async with ChatServer(lambda request: said("yes"), passing, passing, headers=NOW).serving() as server:
        found = await turn(server, attempts=3)
    assert (found.reply.message.content, found.retries) == ("yes", 2)
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
        (reply(said("x"), "error"), "protocol", 1),
        (reply(said("x"), "abort"), "protocol", 1),
    ],
)
async def test_every_failure_is_typed_and_fails_the_episode(behaviour, kind, requests, quick):
    server = ChatServer(lambda request: said("3"), *[behaviour] * requests, headers=NOW)
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
        assert again.step_rewards == (1.0,), "the next turn finds the connection as it was"


async def test_an_error_is_told_in_its_own_words():
    async with ChatServer(None, (400, refusal("temperature must be\n\x1b[1m 1"))).serving() as server:
        with pytest.raises(EndpointError) as failed:
            await turn(server)
    assert str(failed.value) == (f"act protocol: {server.url} answered 400: temperature must be [1m 1")
    assert failed.value.status == 400


async def test_where_nobody_listens_it_is_unavailable(quick):
    async with ChatServer().serving() as server:
        pass
    with pytest.raises(EndpointError) as failed:
        await turn(server)
    assert failed.value.kind == "unavailable"


async def test_a_server_that_hangs_is_given_up_in_time():
    async with ChatServer(lambda request: said("yes"), "hang").serving() as server:
        with pytest.raises(EndpointError) as failed:
            await asyncio.wait_for(turn(server, timeout_s=0.2), 20)
        assert (failed.value.kind, failed.value.detail) == ("timeout", f"{server.url} gave no turn in 0.2 s")
        await asyncio.wait_for(server.closed.wait(), 10)


async def test_waiting_for_others_is_not_the_endpoints_time():
    server = ChatServer(lambda request: said("yes"), "hang")
    async with (
        server.serving(),
        ChatEndpoint(url=server.url, timeout_s=1.5, max_requests=1).connected() as connection,
    ):
        request = ChatSettings("m").request([{"role": "user", "content": "?"}], [], seed=1)
        asked = [connection.complete(request) for _ in range(2)]
        hung, answered = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(hung, EndpointError)
    assert answered.reply.message.content == "yes"


@pytest.mark.parametrize("how", ["seconds", "date"])
async def test_the_wait_that_a_server_asks_for_is_kept(how):
    async def waited(asked):
        async with ChatServer(None, 429, headers=f"Retry-After: {asked}\r\n").serving() as server:
            with pytest.raises(EndpointError) as failed:
                await turn(server, timeout_s=0.6)
        assert server.counts["requests"] == 1, "nothing is sent before"
        assert failed.value.detail.endswith("gave no turn in 0.6 s; before that it answered 429: try again")

    await waited("30" if how == "seconds" else email.utils.formatdate(time.time() + 30, usegmt=True))


async def test_an_endless_reply_is_cut_off(monkeypatch):
    monkeypatch.setattr("agentrl.rollout.chat.endpoint._MAX_REPLY_BYTES", 1000)
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


async def test_the_query_of_an_address_is_kept_and_its_path_extended():
    endpoint = ChatEndpoint(url="http://127.0.0.1:1/openai/v1/?version=2")
    assert str(endpoint.address("models")) == "http://127.0.0.1:1/openai/v1/models?version=2"


@pytest.mark.parametrize("where", ["error", "content", "call", "text"])
async def test_a_key_that_a_server_repeats_is_blotted_out(where, caplog):
    caplog.set_level(logging.DEBUG)
    loud = {
        "error": (400, refusal(f"I know {KEY}!")),
        "text": (400, f"<html>{KEY}</html>".encode()),
        "content": reply(said(f"your key is {KEY}")),
        "call": reply(said(None, [("echo", f'{{"text": "{KEY}"}}')])),
    }[where]
    async with ChatServer(None, loud).serving() as server:
        if where in ("error", "text"):
            with pytest.raises(EndpointError, match=r"\*\*\*") as failed:
                await turn(server, key=KEY)
            shown = "".join(traceback.format_exception(failed.value))
        else:
            shown = repr(await turn(server, key=KEY))
            assert "***" in shown
    assert KEY not in shown
    assert KEY not in caplog.text
    assert KEY not in repr(ChatEndpoint(url=server.url, key=KEY))


async def test_a_word_that_stands_for_no_key_is_left_alone():
    async with ChatServer(lambda request: said("the list is EMPTY")).serving() as server:
        assert (await turn(server, key="EMPTY")).reply.message.content == "the list is EMPTY"


@pytest.mark.parametrize("key", ["", " ", "two\nlines", "schlüssel", "blank "])
def test_what_cannot_be_a_key_is_refused_without_being_shown(key):
    with pytest.raises(ConfigError, match="variable MY_KEY holds no key") as refused:
        ChatEndpoint(url="http://127.0.0.1:1/v1", key=key, key_env="MY_KEY")
    assert not key.strip() or key not in str(refused.value)


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://127.0.0.1/v1", "http://127.0.0.1@127.0.0.1/v1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="address"):
        ChatEndpoint(url=url)


@pytest.mark.parametrize("setting", ["timeout_s", "attempts", "max_requests"])
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ConfigError, match="timeout_s above 0"):
        ChatEndpoint(url="http://127.0.0.1:1/v1", **{setting: 0})


async def test_a_sound_endpoint_is_asked_for_one_turn_with_the_tools():
    async with ChatServer(key=KEY, models=["gpt-small"]).serving() as server:
        await checked(server, key=KEY)
    (asked,) = server.asked
    assert (asked["model"], len(asked["tools"])) == ("gpt-small", 2)


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
async def test_what_a_person_can_mend_is_one_sentence(server, options, sentence):
    server.asked.clear()
    async with server.serving():
        with pytest.raises(ConfigError) as told:
            await checked(server, **options)
    said_so = str(told.value)
    assert sentence.format(url=server.url) in said_so
    assert said_so.count("\n") == 0
    assert KEY not in said_so
