"""Requests that are ended early, by weight updates and crashed servers, are resumed."""

from __future__ import annotations

import asyncio
import json
import time

import httpx2
import numpy as np
import pytest

from agentrl.engine.sglang import SGLangPolicy, request, wire
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.request import Draft
from agentrl.errors import EngineUnavailableError
from agentrl.types import Finish
from agentrl.types.seams import Sampling
from agentrl.types.statistics import SPECULATION
from tests.engine.serving import CONTROL, ScriptedServer, embedded_server, generated
from tests.engine.subjects import logits_of, text_of, tiny
from tests.engine.test_fleet import publish
from tests.engine.test_sglang_client import complete, wait_for_requests

ENDED = {"type": "abort", "message": "Aborted"}
STOPPED = {"type": "stop", "matched": 7}


def drafted(sampling, *replies, decode=text_of):
    draft = Draft(sampling, decode)
    for reply in replies:
        draft.add(wire.read(wire.GenerateReply, json.dumps(reply).encode(), "the reply"))
    return draft


async def test_a_request_that_was_ended_resumes_from_its_tokens_each_part_with_its_version():
    first = generated([4, 5], ENDED, weight_version="1", cached_tokens=2)
    second = generated([6], ENDED, weight_version="2", cached_tokens=5)
    server = ScriptedServer(first, second, generated([7, 8], weight_version="3"))
    async with server.listening() as url:
        policy = SGLangPolicy(url)
        prompt = np.asarray([1, 2, 3], np.int32)
        completion = await policy.generate(prompt, Sampling(5, seed=11), session="a")
        await policy.close()
    assert completion.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert completion.versions.tolist() == [1, 1, 2, 3, 3]
    assert completion.logprobs.tolist() == [-0.5] * 5
    assert (completion.finish, completion.cached_tokens, policy.version) == (Finish.LENGTH, 2, 3)
    assert [request["input_ids"] for request in server.requests] == [
        [1, 2, 3],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 6],
    ]
    assert [request["sampling_params"]["max_new_tokens"] for request in server.requests] == [5, 3, 2]
    assert len({request["sampling_params"]["sampling_seed"] for request in server.requests}) == 3
    assert len({request["rid"] for request in server.requests}) == 3
    assert policy.counts == {
        "requests": 1, "aborts": 0, "resumed": 2, "prompt_tokens": 3, "cached_tokens": 2,
    }  # fmt: skip


async def test_drafts_of_all_parts_are_counted():
    """As SGLang's source has it: `spec_num_proposed_drafts` and so on, beside `spec_accept_rate`."""
    of_parts = [(6, 3, 2), (9, 4, 3)]
    parts = [
        dict(zip(("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct"), own, strict=True))
        for own in of_parts
    ]
    server = ScriptedServer(generated([4, 5], ENDED, **parts[0]), generated([6], **parts[1]))
    async with server.listening() as url:
        policy = SGLangPolicy(url)
        completion = await policy.generate([1], Sampling(3), session="a")
        await policy.close()
    assert [policy.counts[name] for name in SPECULATION] == [15, 7, 5]
    # Each request keeps its own, also where a later one goes on with its tokens.
    assert completion.speculation == dict(zip(SPECULATION, (15, 7, 5), strict=True))
    rule = Sampling(4, continues=completion)
    last = drafted(rule, generated([7], **parts[0]))
    assert last.completion().speculation == dict(zip(SPECULATION, (21, 10, 7), strict=True))
    assert [last.speculation[name] for name in SPECULATION] == [6, 3, 2]


def test_a_stop_string_across_two_parts_is_detected():
    rule = Sampling(9, stop=("56",))
    draft = drafted(rule, generated([4, 5], ENDED), generated([6, 8, 9], {"type": "stop", "matched": 2}))
    completion = draft.completion()
    assert (completion.token_ids.tolist(), completion.finish, completion.matched) == (
        [4, 5, 6],
        Finish.STOP,
        "56",
    )


def test_parts_are_read_as_one_text():
    """A tokenizer may drop the leading space of a part."""

    def decode(ids):
        return " ".join(map(str, ids))

    replies = [generated([4], ENDED) | {"text": "4"}, generated([5, 6]) | {"text": "5 6"}]
    completion = drafted(Sampling(3, stop=("4 5",)), *replies, decode=decode).completion()
    assert (completion.token_ids.tolist(), completion.matched) == ([4, 5], "4 5")


@pytest.mark.parametrize(
    ("ids", "rule", "finish"),
    [([4, 5], Sampling(2), Finish.LENGTH), ([4, 5, 6], Sampling(9, stop=("56",)), Finish.STOP)],
)
def test_an_abort_at_the_end_of_a_completion_is_its_end(ids, rule, finish):
    draft = drafted(rule, generated(ids, ENDED))
    assert draft.ended
    assert draft.completion().finish is finish


async def test_requests_share_cached_prefixes_only_where_their_salts_are_equal():
    ids = list(range(1, 21))
    rules = {"temperature": 0, "max_new_tokens": 4}
    async with embedded_server() as (url, _), httpx2.AsyncClient(base_url=url, trust_env=False) as client:

        async def generate(**body):
            body |= {"input_ids": ids, "sampling_params": rules}
            reply = await client.post("/generate", json=body, headers={wire.ROUTING_KEY: "a"})
            return reply.json()

        salts = ({}, {"extra_key": "1"}, {"extra_key": "1"}, {"extra_key": "2"}, {})
        cached = [(await generate(**salt))["meta_info"]["cached_tokens"] for salt in salts]
        assert cached == [0, 0, len(ids) - 1, 0, len(ids) - 1]
        for wrong in (["1", "2"], 3, "x" * 257):
            assert "`extra_key`" in (await generate(extra_key=wrong))["error"]["message"]


@pytest.mark.parametrize("salted", [True, False])
async def test_stale_prefix_cache_no_prefix_of_older_weights_is_used_where_nothing_is_flushed(salted):
    """The caches of this server survive an update, as SGLang's do where a flush is refused."""
    rule, ids = Sampling(8, seed=1), [1, 2, 3, 4, 5]
    async with embedded_server() as (url, engine):
        engine.memory.drop_caches = lambda: None
        policy = SGLangPolicy(url)
        for version in (0, 1):
            if version:
                async with policy.held():
                    await publish(engine, version)
                    policy.salt = "1" if salted else "0"
            completion = await policy.generate(ids, rule, session="a")
            start, ids = len(ids), [*ids, *completion.token_ids.tolist()]
        await policy.close()
    rows = logits_of(tiny("qwen3", 1), ids)[start - 1 : -1].astype(np.float64)
    exact = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    difference = np.abs(exact[np.arange(8), completion.token_ids] - completion.logprobs).max()
    assert (completion.cached_tokens == 0, difference < 1e-4) == (salted, salted)


async def test_every_part_of_a_request_has_the_salt_of_the_weights_that_compute_it():
    first = generated([4, 5], ENDED, weight_version="1")
    server = ScriptedServer(first, generated([6], ENDED, weight_version="1"), generated([7, 8]))
    async with server.listening() as url:
        policy = SGLangPolicy(url)
        await policy.generate([1], Sampling(5), session="a")
        # Nobody sends weights through this policy: the version that the server reports is all it knows.
        assert [request["extra_key"] for request in server.requests] == ["0", "1", "1"]
        policy.salt = "2.00ff"
        await policy.generate([1], Sampling(2), session="b")
        await policy.close()
    assert server.requests[-1]["extra_key"] == "2.00ff"


async def test_held_requests_go_on_afterwards_and_none_is_sent_meanwhile():
    async with embedded_server() as (url, engine):
        policy = SGLangPolicy(url)
        running = [asyncio.create_task(complete(policy, f"s{n}", 60)) for n in range(3)]
        while engine.num_requests < 3:
            await asyncio.sleep(0)
        async with policy.held():
            assert engine.num_requests == 0
            late = asyncio.create_task(complete(policy, "late", 4))
            await asyncio.sleep(0.1)
            assert engine.num_requests == 0
            assert not any(task.done() for task in [*running, late])
        done = await asyncio.gather(*running, late)
        await policy.close()
    assert [len(completion.token_ids) for completion in done] == [60, 60, 60, 4]
    assert {completion.finish for completion in done} == {Finish.LENGTH}
    assert policy.counts["resumed"] == 3


@pytest.mark.parametrize("overtakes", [True, False])
async def test_a_hold_ends_what_an_abort_of_all_requests_has_overtaken(overtakes):
    async with embedded_server() as (url, engine):
        policy, server = SGLangPolicy(url), Server(url, CONTROL)
        running = asyncio.create_task(complete(policy, "a", 200))
        while not engine.num_requests:
            await asyncio.sleep(0)

        async def abort_all():
            if not overtakes:
                await server.abort_all()
            ends.append(time.perf_counter())

        ends = []
        async with policy.held(abort_all) as still_since:
            assert engine.num_requests == 0
            assert ends[0] <= still_since <= time.perf_counter()
        assert len((await running).token_ids) == 200
        await server.close()
        await policy.close()


async def test_a_held_request_can_be_aborted():
    async with embedded_server() as (url, engine):
        policy = SGLangPolicy(url)
        running = asyncio.create_task(complete(policy, "a", 200))
        while not engine.num_requests:
            await asyncio.sleep(0)
        async with policy.held():
            await asyncio.wait_for(policy.abort(), 5)
            assert (await running).finish is Finish.ABORT
        await policy.close()


async def test_a_pause_of_the_server_by_anyone_is_survived():
    """As a trainer does for an update: all requests are ended, and new ones block until it is over."""
    async with embedded_server() as (url, engine), httpx2.AsyncClient(headers=CONTROL) as trainer:
        policy = SGLangPolicy(url)
        greedy = Sampling(80, temperature=0.0)
        uninterrupted = await policy.generate([1, 2, 3], greedy, session="a")
        running = asyncio.create_task(policy.generate([1, 2, 3], greedy, session="b"))
        while not engine.num_requests:
            await asyncio.sleep(0)
        await trainer.post(f"{url}/pause_generation", json={"mode": "abort"})
        while not policy.counts["resumed"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not running.done()
        await trainer.post(f"{url}/continue_generation", json={})
        completion = await asyncio.wait_for(running, 20)
        await policy.close()
    assert completion.token_ids.tolist() == uninterrupted.token_ids.tolist()
    assert completion.logprobs.tolist() == pytest.approx(uninterrupted.logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("broken", ["drop", (502, "bad gateway")])
async def test_with_resend_lost_the_part_of_a_crashed_server_is_sampled_again(broken):
    server = ScriptedServer(generated([4, 5], ENDED), broken, generated([6, 7, 8]))
    async with server.listening() as url:
        policy = SGLangPolicy(url, resend_lost=True)
        completion = await asyncio.wait_for(policy.generate([1], Sampling(5), session="a"), 20)
        await policy.close()
    assert completion.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert [request["input_ids"] for request in server.requests] == [[1], [1, 4, 5], [1, 4, 5]]
    assert (policy.counts["lost"], policy.counts["resumed"]) == (1, 1)


async def test_a_request_that_a_hanging_server_does_not_end_for_a_hold_is_sent_again(monkeypatch):
    """Its caller wants its tokens: only an abort of its own ends it without them."""
    monkeypatch.setattr(request, "ABORT_TIMEOUT_S", 0.3)
    server = ScriptedServer("hang", generated([4, 5]))
    async with server.listening() as url:
        policy = SGLangPolicy(url, resend_lost=True)
        running = asyncio.create_task(policy.generate([1], Sampling(2), session="a"))
        await server.request_received.wait()
        async with policy.held():
            assert not running.done()
        completion = await asyncio.wait_for(running, 20)
        server.replies = ["hang"]
        aborted = asyncio.create_task(policy.generate([1], Sampling(2), session="a"))
        await wait_for_requests(server, 3)
        await policy.abort()
        with pytest.raises(EngineUnavailableError, match="did not answer"):
            await aborted
        await policy.close()
    assert completion.token_ids.tolist() == [4, 5]
    assert policy.counts["lost"] == 1


async def test_attempts_are_limited():
    async with ScriptedServer("drop").listening() as url:
        policy = SGLangPolicy(url, resend_lost=True, attempts=2)
        with pytest.raises(EngineUnavailableError, match="broke off"):
            await complete(policy)
        await policy.close()
    server = ScriptedServer(generated([], ENDED))
    async with server.listening() as url:
        policy = SGLangPolicy(url, attempts=3)
        with pytest.raises(EngineUnavailableError, match="ended a request 3 times before it sampled a token"):
            await complete(policy)
        await policy.close()
    assert len(server.requests) == 3


async def test_an_abort_reaches_the_other_servers_where_one_is_down():
    alive = ScriptedServer("hang")

    class Router(ScriptedServer):
        async def _answer(self, head, body, writer):
            path = head.split(" ")[1]
            workers_reply = {"workers": [{"url": "http://127.0.0.1:1"}, {"url": alive_url}]}
            if path == "/generate":
                return await super()._answer(head, body, writer)
            return await self._send(workers_reply if path == "/workers" else (404, ""), writer)

    router = Router("hang")
    async with alive.listening() as alive_url, router.listening() as url:
        policy = SGLangPolicy(url, timeout_s=5)
        policy._connection.capacity = wire.UNBOUNDED_CAPACITY
        task = asyncio.create_task(complete(policy))
        await wait_for_requests(router)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await policy.close()
    assert set(alive.aborted) == {router.requests[0]["rid"]}
