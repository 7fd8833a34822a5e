"""The policy over HTTP: deadlines, aborts, retries and bounds, against servers that misbehave on purpose."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentrl.engine.sglang import SGLangPolicy
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError, RequestTooLargeError
from agentrl.gate import Gate
from agentrl.protocols import Sampling
from agentrl.types import Finish
from tests.engine.serving import Said, embedded_server, free_port, generated

ABORTED = generated([1, 2], {"type": "abort", "message": "Aborted"})
PATIENCE_S = 20


async def asked(policy, session="a", new=3):
    return await asyncio.wait_for(policy.generate([1, 2, 3], Sampling(new), session=session), PATIENCE_S)


async def arrived(said, count=1):
    while len(said.seen) < count:
        said.arrived.clear()
        await asyncio.wait_for(said.arrived.wait(), PATIENCE_S)


async def test_a_request_carries_its_session_and_the_headers_of_the_policy():
    said = Said(generated([1, 2, 3], cached_tokens=2, weight_version="5"))
    async with said.listening() as url:
        policy = SGLangPolicy(f"{url}/", headers={"authorization": "Bearer k"})
        got = await asked(policy, "episode 7")
        await asked(policy, "café")
        await policy.close()
    assert got.token_ids.tolist() == [1, 2, 3]
    assert policy.version == 5
    assert "x-smg-routing-key: episode 7\r\n" in said.heads[0]
    assert "authorization: bearer k\r\n" in said.heads[0]
    assert f"x-smg-routing-key: {'café'.encode().hex()}\r\n" in said.heads[1]
    assert said.seen[0]["rid"] != said.seen[1]["rid"]
    assert {len(one["rid"]) for one in said.seen} == {32}, "an abort ends every rid that begins with its own"
    assert policy.counts == {"requests": 2, "aborts": 0, "prompt_tokens": 6, "cached_tokens": 4}


async def test_connections_are_used_again():
    said = Said(generated([1, 2, 3]))
    async with said.listening() as url:
        policy = SGLangPolicy(url, max_concurrency=1)
        for _ in range(5):
            await asked(policy)
        await policy.close()
    assert (len(said.seen), said.connections) == (5, 1)


async def test_no_more_requests_than_allowed_are_sent_at_once_and_an_abort_reaches_those_that_wait():
    said = Said("hang")
    async with said.listening() as url:
        policy = SGLangPolicy(url, max_concurrency=2, timeout_s=1)
        tasks = [asyncio.create_task(asked(policy, f"s{n}")) for n in range(5)]
        await arrived(said, 2)
        await asyncio.sleep(0.1)
        assert len(said.seen) == 2
        ending = asyncio.create_task(policy.abort())
        waited = await asyncio.wait_for(asyncio.gather(*tasks[2:]), PATIENCE_S)
        assert {one.finish for one in waited} == {Finish.ABORT}
        assert len(said.seen) == 2, "what was aborted before it was sent is not sent"
        await asyncio.wait_for(said.abort_came.wait(), PATIENCE_S)
        ended = await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert all(isinstance(one, EngineUnavailableError) for one in ended), "they hang until their deadline"
        await ending
        await policy.close()


async def test_an_abort_is_told_again_until_the_request_has_left():
    replies = asyncio.Queue()

    class Late(Said):
        async def _say(self, reply, writer):
            await super()._say(await replies.get() if reply == "late" else reply, writer)

    said = Late("late")
    async with said.listening() as url:
        policy = SGLangPolicy(url)
        task = asyncio.create_task(asked(policy))
        await arrived(said)
        ending = asyncio.create_task(policy.abort())
        async with asyncio.timeout(PATIENCE_S):
            while len(said.aborted) < 3:
                await asyncio.sleep(0.01)
        replies.put_nowait(ABORTED)
        got = await asyncio.wait_for(task, PATIENCE_S)
        await asyncio.wait_for(ending, PATIENCE_S)
        await policy.close()
    assert (got.token_ids.tolist(), got.finish) == ([1, 2], Finish.ABORT)
    assert set(said.aborted) == {said.seen[0]["rid"]}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_what_nobody_waits_for_is_ended_on_the_server(how):
    said = Said("hang")
    async with said.listening() as url:
        policy = SGLangPolicy(url, timeout_s=0.3 if how == "deadline" else 60)
        task = asyncio.create_task(asked(policy))
        await arrived(said)
        if how == "cancel":
            task.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else EngineUnavailableError):
            await task
        await policy.close()
    assert set(said.aborted) == {said.seen[0]["rid"]}


async def test_cancelling_frees_the_engine_behind_a_server():
    async with embedded_server() as (url, engine):
        policy = SGLangPolicy(url)
        tasks = [asyncio.create_task(asked(policy, f"s{n}", 200)) for n in range(6)]
        while engine.num_requests < 6:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await policy.close()
        assert engine.num_requests == 0


@pytest.mark.parametrize("busy", ["refuse", (429, "slow down")])
async def test_what_no_server_has_begun_with_is_sent_again(busy):
    said = Said(busy, generated([1, 2, 3]))
    async with said.listening() as url:
        policy = SGLangPolicy(url)
        assert (await asked(policy)).token_ids.tolist() == [1, 2, 3]
        await policy.close()
    assert (len(said.seen), policy.counts["retries"]) == (2, 1)


async def test_a_server_that_comes_late_is_met():
    port = free_port()
    policy = SGLangPolicy(f"http://127.0.0.1:{port}", attempts=8)
    task = asyncio.create_task(asked(policy))
    while policy.counts["retries"] < 1:
        await asyncio.sleep(0.01)
    async with Said(generated([1, 2, 3])).listening(port):
        assert (await task).token_ids.tolist() == [1, 2, 3]
        await policy.close()


BROKEN = ["drop", (500, "boom"), (502, "bad gateway"), (504, "late"), {"no": "reply"}]


@pytest.mark.parametrize("broken", BROKEN)
async def test_what_may_have_been_sampled_is_never_sent_again(broken):
    said = Said(broken, generated([1, 2, 3]))
    async with said.listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(EngineError) as raised:
            await asked(policy)
        assert len(said.seen) == 1
        assert url in str(raised.value)
        assert (await asked(policy)).token_ids.tolist() == [1, 2, 3]
        await policy.close()


@pytest.mark.parametrize(("broken", "typed"), [("drop", True), ((502, "x"), True), ((400, "x"), False)])
async def test_a_dead_server_is_told_from_one_that_refuses(broken, typed):
    async with Said(broken).listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(EngineError) as raised:
            await asked(policy)
        assert isinstance(raised.value, EngineUnavailableError) is typed
        await policy.close()


async def test_nobody_there_is_one_sentence():
    policy = SGLangPolicy(f"http://127.0.0.1:{free_port()}", attempts=2)
    with pytest.raises(EngineUnavailableError, match=r"cannot be reached .* is the server up"):
        await asked(policy)
    await policy.close()


async def test_the_servers_own_context_bounds_requests():
    said = Said(generated([1]), info={"context_length": 64, "max_req_input_len": 58})
    async with said.listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(RequestTooLargeError, match="62 tokens in all"):
            await asked(policy, new=60)
        assert said.seen == []
        assert await policy.connect() == (62, 57)
        await policy.close()


async def test_a_router_is_asked_for_its_servers():
    worker = Said(ABORTED, info={"context_length": 32})

    class Router(Said):
        async def _answer(self, head, body, writer):
            path = head.split(" ")[1]
            told = {"workers": [{"url": where, "is_healthy": True}]}
            if path == "/generate":
                return await super()._answer(head, body, writer)
            return await self._say(told if path == "/workers" else (404, ""), writer)

    router = Router("hang")
    async with worker.listening() as where, router.listening() as url:
        policy = SGLangPolicy(url, timeout_s=0.5)
        assert (await policy.connect()).total == 32
        with pytest.raises(EngineUnavailableError):
            await asked(policy)
        await policy.close()
    assert router.aborted == []
    assert set(worker.aborted) == {router.seen[0]["rid"]}


async def test_a_router_without_servers_is_one_sentence():
    class Empty(Said):
        async def _answer(self, head, body, writer):
            await self._say({"workers": []} if "/workers" in head else (404, ""), writer)

    async with Empty().listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(EngineUnavailableError, match="has no servers"):
            await policy.connect()
        await policy.close()


@pytest.mark.parametrize(
    ("ids", "sentence"), [([1, 61], "from 1 to 61, the model knows 0 to 60"), ([-1], "-1")]
)
async def test_a_token_that_would_kill_the_server_is_not_sent(ids, sentence):
    said = Said(generated([1]))
    async with said.listening() as url:
        policy = SGLangPolicy(url, vocab_size=61)
        with pytest.raises(EngineError, match=sentence):
            await policy.generate(ids, Sampling(1), session="a")
        await policy.close()
    assert said.seen == []


async def test_closing_ends_a_session_that_runs():
    async with embedded_server() as (url, engine):
        policy = SGLangPolicy(url)
        task = asyncio.create_task(asked(policy, "a", 200))
        while not engine.num_requests:
            await asyncio.sleep(0)
        await policy.close_session("a")
        assert (await task).finish is Finish.ABORT
        await policy.close()


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000", "ftp://127.0.0.1", "http://", "http://:30000", "x y"])
def test_what_is_no_address_is_a_config_error(url):
    with pytest.raises(ConfigError, match="is not an address"):
        SGLangPolicy(url)


@pytest.mark.parametrize("change", [{"max_concurrency": 0}, {"attempts": 0}, {"timeout_s": 0}])
def test_settings_out_of_range_are_a_config_error(change):
    with pytest.raises(ConfigError):
        SGLangPolicy("http://127.0.0.1:1", **change)


async def test_a_reply_that_never_ends_is_cut_off(monkeypatch):
    monkeypatch.setattr("agentrl.engine.sglang.connection._MAX_REPLY_BYTES", 1000)
    async with Said(json.dumps("x" * 2000)).listening() as url:
        policy = SGLangPolicy(url)
        with pytest.raises(EngineError, match="longer than 1,000 bytes"):
            await asked(policy)
        await policy.close()


async def test_a_gate_lets_in_as_many_as_it_holds_in_order_and_loses_no_room():
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
    # Let in and cancelled in the same moment.
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
