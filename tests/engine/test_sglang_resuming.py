"""Requests that are ended before their end, by new weights and by servers that die, go on."""

from __future__ import annotations

import asyncio
import json

import httpx2
import numpy as np
import pytest

from agentrl.engine.sglang import SGLangPolicy, wire
from agentrl.engine.sglang.request import Draft
from agentrl.errors import EngineUnavailableError
from agentrl.protocols import Sampling
from agentrl.types import Finish
from tests.engine.serving import Said, embedded_server, generated
from tests.engine.subjects import text_of
from tests.engine.test_sglang_client import arrived, asked

ENDED = {"type": "abort", "message": "Aborted"}
STOPPED = {"type": "stop", "matched": 7}


def drafted(sampling, *replies, decode=text_of):
    draft = Draft(sampling, decode)
    for reply in replies:
        draft.add(wire.read(wire.GenerateReply, json.dumps(reply).encode(), "the reply"))
    return draft


async def test_what_was_ended_goes_on_from_its_own_tokens_each_part_with_its_version():
    first = generated([4, 5], ENDED, weight_version="1", cached_tokens=2)
    second = generated([6], ENDED, weight_version="2", cached_tokens=5)
    said = Said(first, second, generated([7, 8], weight_version="3"))
    async with said.listening() as url:
        policy = SGLangPolicy(url)
        prompt = np.asarray([1, 2, 3], np.int32)
        got = await policy.generate(prompt, Sampling(5, seed=11), session="a")
        await policy.close()
    assert got.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert got.versions.tolist() == [1, 1, 2, 3, 3]
    assert got.logprobs.tolist() == [-0.5] * 5
    assert (got.finish, got.cached_tokens, policy.version) == (Finish.LENGTH, 2, 3)
    assert [one["input_ids"] for one in said.seen] == [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    assert [one["sampling_params"]["max_new_tokens"] for one in said.seen] == [5, 3, 2]
    assert len({one["sampling_params"]["sampling_seed"] for one in said.seen}) == 3
    assert len({one["rid"] for one in said.seen}) == 3
    assert policy.counts == {
        "requests": 1, "aborts": 0, "resumed": 2, "prompt_tokens": 3, "cached_tokens": 2,
    }  # fmt: skip


def test_a_stop_that_was_written_in_two_parts_is_found():
    rule = Sampling(9, stop=("56",))
    draft = drafted(rule, generated([4, 5], ENDED), generated([6, 8, 9], {"type": "stop", "matched": 2}))
    got = draft.completion()
    assert (got.token_ids.tolist(), got.finish, got.matched) == ([4, 5, 6], Finish.STOP, "56")


def test_parts_are_read_as_one_text():
    """A tokenizer may leave out the blank that a part begins with."""

    def decode(ids):
        return " ".join(map(str, ids))

    replies = [generated([4], ENDED) | {"text": "4"}, generated([5, 6]) | {"text": "5 6"}]
    got = drafted(Sampling(3, stop=("4 5",)), *replies, decode=decode).completion()
    assert (got.token_ids.tolist(), got.matched) == ([4, 5], "4 5")


@pytest.mark.parametrize(
    ("ids", "rule", "finish"),
    [([4, 5], Sampling(2), Finish.LENGTH), ([4, 5, 6], Sampling(9, stop=("56",)), Finish.STOP)],
)
def test_what_was_ended_at_its_end_has_ended(ids, rule, finish):
    draft = drafted(rule, generated(ids, ENDED))
    assert draft.ended
    assert draft.completion().finish is finish


async def test_held_requests_go_on_afterwards_and_none_is_sent_meanwhile():
    async with embedded_server() as (url, engine):
        policy = SGLangPolicy(url)
        running = [asyncio.create_task(asked(policy, f"s{n}", 60)) for n in range(3)]
        while engine.num_requests < 3:
            await asyncio.sleep(0)
        async with policy.held():
            assert engine.num_requests == 0
            late = asyncio.create_task(asked(policy, "late", 4))
            await asyncio.sleep(0.1)
            assert engine.num_requests == 0
            assert not any(task.done() for task in [*running, late])
        done = await asyncio.gather(*running, late)
        await policy.close()
    assert [len(one.token_ids) for one in done] == [60, 60, 60, 4]
    assert {one.finish for one in done} == {Finish.LENGTH}
    assert policy.counts["resumed"] == 3


async def test_what_is_held_can_be_aborted():
    async with embedded_server() as (url, engine):
        policy = SGLangPolicy(url)
        running = asyncio.create_task(asked(policy, "a", 200))
        while not engine.num_requests:
            await asyncio.sleep(0)
        async with policy.held():
            await asyncio.wait_for(policy.abort(), 5)
            assert (await running).finish is Finish.ABORT
        await policy.close()


async def test_a_pause_of_the_server_by_anyone_is_survived():
    """As a trainer does around new weights: everything is ended, and blocks until it goes on."""
    async with embedded_server() as (url, engine), httpx2.AsyncClient() as trainer:
        policy = SGLangPolicy(url)
        greedy = Sampling(80, temperature=0.0)
        whole = await policy.generate([1, 2, 3], greedy, session="a")
        running = asyncio.create_task(policy.generate([1, 2, 3], greedy, session="b"))
        while not engine.num_requests:
            await asyncio.sleep(0)
        await trainer.post(f"{url}/pause_generation", json={"mode": "abort"})
        while not policy.counts["resumed"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not running.done()
        await trainer.post(f"{url}/continue_generation", json={})
        got = await asyncio.wait_for(running, 20)
        await policy.close()
    assert got.token_ids.tolist() == whole.token_ids.tolist()
    assert got.logprobs.tolist() == pytest.approx(whole.logprobs.tolist(), abs=1e-5)


@pytest.mark.parametrize("broken", ["drop", (502, "bad gateway")])
async def test_where_the_policy_may_ask_anew_a_dead_servers_part_is_sampled_again(broken):
    said = Said(generated([4, 5], ENDED), broken, generated([6, 7, 8]))
    async with said.listening() as url:
        policy = SGLangPolicy(url, resend_lost=True)
        got = await asyncio.wait_for(policy.generate([1], Sampling(5), session="a"), 20)
        await policy.close()
    assert got.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert [one["input_ids"] for one in said.seen] == [[1], [1, 4, 5], [1, 4, 5]]
    assert (policy.counts["lost"], policy.counts["resumed"]) == (1, 1)


async def test_nobody_asks_for_ever():
    async with Said("drop").listening() as url:
        policy = SGLangPolicy(url, resend_lost=True, attempts=2)
        with pytest.raises(EngineUnavailableError, match="broke off"):
            await asked(policy)
        await policy.close()
    said = Said(generated([], ENDED))
    async with said.listening() as url:
        policy = SGLangPolicy(url, attempts=3)
        with pytest.raises(EngineUnavailableError, match="ended a request 3 times before it sampled a token"):
            await asked(policy)
        await policy.close()
    assert len(said.seen) == 3


async def test_a_server_that_is_gone_keeps_no_other_from_hearing_an_abort():
    alive = Said("hang")

    class Router(Said):
        async def _answer(self, head, body, writer):
            path = head.split(" ")[1]
            told = {"workers": [{"url": "http://127.0.0.1:1"}, {"url": where}]}
            if path == "/generate":
                return await super()._answer(head, body, writer)
            return await self._say(told if path == "/workers" else (404, ""), writer)

    router = Router("hang")
    async with alive.listening() as where, router.listening() as url:
        policy = SGLangPolicy(url, timeout_s=5)
        policy._connection.capacity = wire.UNBOUNDED_CAPACITY
        task = asyncio.create_task(asked(policy))
        await arrived(router)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await policy.close()
    assert set(alive.aborted) == {router.seen[0]["rid"]}
