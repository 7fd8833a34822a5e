"""The policy over HTTP: deadlines, aborts, retries and bounds, against servers that misbehave on purpose."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.client import AdapterChoice, Requested
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError, RequestTooLargeError
from agentrl.runtime.gate import Gate
from agentrl.types import Finish
from agentrl.types.seams import Sampling
from tests.engine.serving import ScriptedServer, embedded_server, free_port, generated

ABORTED = generated([1, 2], {"type": "abort", "message": "Aborted"})
PATIENCE_S = 20


async def complete(policy, session="a", new=3):
    return await asyncio.wait_for(policy.generate([1, 2, 3], Sampling(new), session=session), PATIENCE_S)


async def wait_for_requests(server, count=1):
    while len(server.requests) < count:
        server.request_received.clear()
        await asyncio.wait_for(server.request_received.wait(), PATIENCE_S)


async def test_a_request_carries_its_session_and_the_headers_of_the_policy():
    server = ScriptedServer(generated([1, 2, 3], cached_tokens=2, weight_version="5"))
    async with server.listening() as url:
        policy = SGLangPolicy(f"{url}/", headers={"authorization": "Bearer k"})
        completion = await complete(policy, "episode 7")
        await complete(policy, "café")
        await policy.close()
    assert completion.token_ids.tolist() == [1, 2, 3]
    assert policy.version == 5
    assert "x-smg-routing-key: episode 7\r\n" in server.headers[0]
    assert "authorization: bearer k\r\n" in server.headers[0]
    assert f"x-smg-routing-key: {'café'.encode().hex()}\r\n" in server.headers[1]
    assert server.requests[0]["rid"] != server.requests[1]["rid"]
    assert {len(request["rid"]) for request in server.requests} == {32}, (
        "an abort ends every rid that begins with its own"
    )
    assert policy.counts == {"requests": 2, "aborts": 0, "prompt_tokens": 6, "cached_tokens": 4}


async def test_connections_are_used_again():
    server = ScriptedServer(generated([1, 2, 3]))
    async with server.listening() as url:
        policy = SGLangPolicy(url, max_concurrency=1)
        for _ in range(5):
            await complete(policy)
        await policy.close()
    assert (len(server.requests), server.connections) == (5, 1)


async def test_no_more_requests_than_allowed_are_sent_at_once_and_an_abort_reaches_those_that_wait():
    server = ScriptedServer("hang")
    async with server.listening() as url:
        policy = SGLangPolicy(url, max_concurrency=2, timeout_s=1)
        tasks = [asyncio.create_task(complete(policy, f"s{n}")) for n in range(5)]
        await wait_for_requests(server, 2)
        await asyncio.sleep(0.1)
        assert len(server.requests) == 2
        ending = asyncio.create_task(policy.abort())
        waited = await asyncio.wait_for(asyncio.gather(*tasks[2:]), PATIENCE_S)
        assert {completion.finish for completion in waited} == {Finish.ABORT}
        assert len(server.requests) == 2, "what was aborted before it was sent is not sent"
        await asyncio.wait_for(server.abort_received.wait(), PATIENCE_S)
        ended = await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert all(isinstance(error, EngineUnavailableError) for error in ended), (
            "they hang until their deadline"
        )
        await ending
        await policy.close()


async def test_an_abort_is_repeated_until_the_request_has_ended():
    replies = asyncio.Queue()

    class Late(ScriptedServer):
        async def _send(self, reply, writer):
            await super()._send(await replies.get() if reply == "late" else reply, writer)

    server = Late("late")
    async with server.listening() as url:
        policy = SGLangPolicy(url)
        task = asyncio.create_task(complete(policy))
        await wait_for_requests(server)
        ending = asyncio.create_task(policy.abort())
        async with asyncio.timeout(PATIENCE_S):
            while len(server.aborted) < 3:
                await asyncio.sleep(0.01)
        replies.put_nowait(ABORTED)
        completion = await asyncio.wait_for(task, PATIENCE_S)
        await asyncio.wait_for(ending, PATIENCE_S)
        await policy.close()
    assert (completion.token_ids.tolist(), completion.finish) == ([1, 2], Finish.ABORT)
    assert set(server.aborted) == {server.requests[0]["rid"]}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_an_abandoned_request_is_aborted_on_the_server(how):
    server = ScriptedServer("hang")
    async with server.listening() as url:
        policy = SGLangPolicy(url, timeout_s=0.3 if how == "deadline" else 60)
        task = asyncio.create_task(complete(policy))
        await wait_for_requests(server)
        if how == "cancel":
            task.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else EngineUnavailableError):
            await task
        await policy.close()
    assert set(server.aborted) == {server.requests[0]["rid"]}


async def test_cancelling_frees_the_engine_behind_a_server():
    async with embedded_server() as (url, engine):
        policy = SGLangPolicy(url)
        tasks = [asyncio.create_task(complete(policy, f"s{n}", 200)) for n in range(6)]
        while engine.num_requests < 6:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await policy.close()
        assert engine.num_requests == 0


@pytest.mark.parametrize("busy", ["refuse", (429, "slow down")])
async def test_an_unstarted_request_is_retried(busy):
    server = ScriptedServer(busy, generated([1, 2, 3]))
    async with server.listening() as url:
        policy = SGLangPolicy(url)
        assert (await complete(policy)).token_ids.tolist() == [1, 2, 3]
        await policy.close()
    assert (len(server.requests), policy.counts["retries"]) == (2, 1)


async def test_a_server_that_starts_late_is_reached():
    port = free_port()
    policy = SGLangPolicy(f"http://127.0.0.1:{port}", attempts=8)
    task = asyncio.create_task(complete(policy))
    while policy.counts["retries"] < 1:
        await asyncio.sleep(0.01)
    async with ScriptedServer(generated([1, 2, 3])).listening(port):
        assert (await task).token_ids.tolist() == [1, 2, 3]
        await policy.close()


BROKEN = ["drop", (500, "boom"), (502, "bad gateway"), (504, "late"), {"no": "reply"}]


@pytest.mark.parametrize("broken", BROKEN)
async def test_a_request_that_may_have_been_sampled_is_never_sent_again(broken):
    server = ScriptedServer(broken, generated([1, 2, 3]))
    async with server.listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(EngineError) as raised:
            await complete(policy)
        assert len(server.requests) == 1
        assert url in str(raised.value)
        assert (await complete(policy)).token_ids.tolist() == [1, 2, 3]
        await policy.close()


@pytest.mark.parametrize(("broken", "typed"), [("drop", True), ((502, "x"), True), ((400, "x"), False)])
async def test_unavailable_and_refusing_servers_raise_different_errors(broken, typed):
    async with ScriptedServer(broken).listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(EngineError) as raised:
            await complete(policy)
        assert isinstance(raised.value, EngineUnavailableError) is typed
        await policy.close()


async def test_an_unreachable_server_is_one_sentence():
    policy = SGLangPolicy(f"http://127.0.0.1:{free_port()}", attempts=2)
    with pytest.raises(EngineUnavailableError, match=r"cannot be reached .* is the server up"):
        await complete(policy)
    await policy.close()


async def test_the_servers_own_context_bounds_requests():
    server = ScriptedServer(generated([1]), info={"context_length": 64, "max_req_input_len": 58})
    async with server.listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(RequestTooLargeError, match="62 tokens in all"):
            await complete(policy, new=60)
        assert server.requests == []
        assert await policy.connect() == (62, 57)
        await policy.close()


async def test_the_servers_of_a_router_are_fetched():
    worker = ScriptedServer(ABORTED, info={"context_length": 32})

    class Router(ScriptedServer):
        async def _answer(self, head, body, writer):
            path = head.split(" ")[1]
            workers_reply = {"workers": [{"url": worker_url, "is_healthy": True}]}
            if path == "/generate":
                return await super()._answer(head, body, writer)
            return await self._send(workers_reply if path == "/workers" else (404, ""), writer)

    router = Router("hang")
    async with worker.listening() as worker_url, router.listening() as url:
        policy = SGLangPolicy(url, timeout_s=0.5)
        assert (await policy.connect()).total == 32
        with pytest.raises(EngineUnavailableError):
            await complete(policy)
        await policy.close()
    assert router.aborted == []
    assert set(worker.aborted) == {router.requests[0]["rid"]}


async def test_a_router_without_servers_is_one_sentence():
    class Empty(ScriptedServer):
        async def _answer(self, head, body, writer):
            await self._send({"workers": []} if "/workers" in head else (404, ""), writer)

    async with Empty().listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(EngineUnavailableError, match="has no servers"):
            await policy.connect()
        await policy.close()


@pytest.mark.parametrize(
    ("ids", "sentence"), [([1, 61], "from 1 to 61, the vocabulary is 0 to 60"), ([-1], "-1")]
)
async def test_a_token_that_would_kill_the_server_is_not_sent(ids, sentence):
    server = ScriptedServer(generated([1]))
    async with server.listening() as url:
        policy = SGLangPolicy(url, vocab_size=61)
        with pytest.raises(EngineError, match=sentence):
            await policy.generate(ids, Sampling(1), session="a")
        await policy.close()
    assert server.requests == []


async def test_closing_ends_a_session_that_runs():
    async with embedded_server() as (url, engine):
        policy = SGLangPolicy(url)
        task = asyncio.create_task(complete(policy, "a", 200))
        while not engine.num_requests:
            await asyncio.sleep(0)
        await policy.close_session("a")
        assert (await task).finish is Finish.ABORT
        await policy.close()


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000", "ftp://127.0.0.1", "http://", "http://:30000", "x y"])
def test_an_invalid_address_is_a_config_error(url):
    with pytest.raises(ConfigError, match="is not an address"):
        SGLangPolicy(url)


@pytest.mark.parametrize("change", [{"max_concurrency": 0}, {"attempts": 0}, {"timeout_s": 0}])
def test_settings_out_of_range_are_a_config_error(change):
    with pytest.raises(ConfigError):
        SGLangPolicy("http://127.0.0.1:1", **change)


async def test_a_reply_that_never_ends_is_cut_off(monkeypatch):
    monkeypatch.setattr("agentrl.engine.sglang.connection._MAX_REPLY_BYTES", 1000)
    async with ScriptedServer(json.dumps("x" * 2000)).listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(EngineError, match="longer than 1,000 bytes"):
            await complete(policy)
        await policy.close()


async def test_a_gate_admits_up_to_its_limit_in_order_and_frees_every_slot():
    gate, order = Gate(2), []

    async def visit(name, ticket):
        if await gate.enter(ticket):
            order.append(name)
            await asyncio.sleep(0)
            gate.leave()

    loop = asyncio.get_running_loop()
    tickets = [loop.create_future() for _ in range(6)]
    tasks = [asyncio.create_task(visit(n, ticket)) for n, ticket in enumerate(tickets)]
    await asyncio.sleep(0)
    tickets[3].set_result(False)
    tasks[4].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 2, 5]
    # Admitted and cancelled in the same iteration.
    first, second = loop.create_future(), loop.create_future()
    assert await gate.enter(loop.create_future())
    assert await gate.enter(loop.create_future())
    waiting = asyncio.create_task(gate.enter(first))
    await asyncio.sleep(0)
    gate.leave()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.wait_for(gate.enter(second), 5)


def test_a_pinned_session_names_the_version_that_it_began_with_while_that_is_loaded():
    pinned, newest = AdapterChoice(2, is_pinned=True), AdapterChoice(2, is_pinned=False)
    salts = [None, "1.aa", "2.bb", "3.cc"]
    seen = {}
    for version, salt in enumerate(salts):
        for session in range(version + 1):
            asked = pinned.of(str(session), salt)
            assert (asked.adapter, asked.version) == (salts[int(asked.version)], asked.version)
            seen.setdefault(session, []).append(int(asked.version))
        assert newest.of("0", salt) == Requested(salt or "0", salt, str(version))
    # One that is gone is followed by the newest, which then stays.
    assert seen == {0: [0, 0, 2, 2], 1: [1, 1, 3], 2: [2, 2], 3: [3]}
    pinned.end("2")
    assert pinned.of("2", salts[3]).version == "3"
