"""One client of `agentrl serve` against the others: a bad request is refused, and costs its sender alone."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import httpx2
import pytest

from agentrl.engine.served import pending, requests
from agentrl.engine.served.config import CONTROL_KEY, control_headers
from agentrl.engine.served.requests import TextCodec
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.wire import ROUTING_KEY
from agentrl.errors import ConfigError, EngineError
from agentrl.http.serving import RequestChecks
from agentrl.types.seams import Sampling
from tests.engine.serving import CODEC, CONTROL, KEY, embedded_server
from tests.engine.subjects import VOCAB, text_of

IDS = [1, 10, 20, 30]
LONG = {"max_new_tokens": 80, "sampling_seed": 3}


def rules(**changes):
    return {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4, **changes}}


ATTACKS = {
    "a stop token beyond 64 bits": rules(stop_token_ids=[2**64]),
    "a stop token beyond 32 bits": rules(stop_token_ids=[2**31]),
    "a stop token beyond the vocabulary": rules(stop_token_ids=[5, VOCAB]),
    "a negative stop token": rules(stop_token_ids=[-1]),
    "many stop tokens": rules(stop_token_ids=[5] * (requests.MAX_STOPS + 1)),
    "many stop strings": rules(stop=["a"] * (requests.MAX_STOPS + 1)),
    "a long stop string": rules(stop="a" * (requests.MAX_STOP_CHARS + 1)),
    "a prompt token beyond 64 bits": {"input_ids": [1, 2**64]},
    "a prompt longer than the context": {"input_ids": [1] * 256, "sampling_params": {"n": 1024}},
    "a text longer than the context": {"text": "1" * 257},
    "a seed beyond 64 bits": rules(sampling_seed=2**64),
    "top_k beyond 32 bits": rules(top_k=2**31),
    "a completion beyond 32 bits": rules(max_new_tokens=2**31),
    "a temperature that float32 cannot hold": rules(temperature=1e300),
    "a long rid": {**rules(), "rid": "r" * (requests.MAX_RID_CHARS + 1)},
    "many prompts": {"input_ids": [[1]] * 1025},
    "many rules": {"input_ids": [[1]], "sampling_params": [{}] * 1025},
    "a body longer than any request": {"input_ids": [1], "padding": " " * (1 << 21)},
    "half a surrogate pair": {"text": "\ud800"},
}


async def attacked(http, attack):
    """Send a body while a request runs; returns the response after that request has ended as by itself."""
    running = asyncio.create_task(http.post("/generate", json={"input_ids": IDS, "sampling_params": LONG}))
    await asyncio.sleep(0.02)
    reply = await http.post("/generate", content=json.dumps(attack).encode())
    return reply, (await running).json()["output_ids"]


async def test_a_bad_request_costs_its_sender_alone():
    async with embedded_server() as (url, engine), client_of(url) as http:
        alone = (await engine.generate(IDS, Sampling(80, seed=3), session="alone")).token_ids.tolist()
        for name, attack in ATTACKS.items():
            reply, tokens = await attacked(http, attack)
            assert reply.status_code == (413 if "body" in name else 400), (name, reply.text)
            assert "\n" not in reply.json()["error"]["message"], name
            assert tokens == alone, name
        width = engine._slots._stops.shape[1]
        assert width <= requests.MAX_STOPS + 8, f"every later step compares with {width} stop tokens"
        assert engine.num_requests == 0


def client_of(url, **headers):
    return httpx2.AsyncClient(
        base_url=url, trust_env=False, timeout=30, headers={"Content-Type": "application/json", **headers}
    )


@pytest.mark.parametrize(
    "body",
    [
        b'{"input_ids":[[1],' + b",".join([b"1.5"] * 200_000) + b"]}",
        b'{"input_ids":[' + b",".join([b'"a"'] * 200_000) + b"]}",
        b'{"input_ids":[[1]],"rid":[' + b",".join([b"7"] * 400_000) + b"]}",
        b'{"input_ids":[1],"sampling_params":[' + b",".join([b"{}"] * 300_000) + b"]}",
        b'{"input_ids":[1],"sampling_params":{"stop":[' + b",".join([b'""'] * 300_000) + b"]}}",
        b'{"input_ids":[1' + b"0" * 1_000_000 + b"]}",
        b'{"input_ids":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
    ],
    ids=["floats", "strings", "rids", "rules", "stops", "digits", "depth"],
)
def test_a_million_wrong_entries_are_refused_as_fast_as_one(body):
    began = time.process_time()
    with pytest.raises(requests.RefusedError) as refused:
        requests.read(requests._Generate, body)
    assert time.process_time() - began < 1.5, "an error for every entry takes seconds"
    assert len(str(refused.value)) < 300


async def test_a_long_text_is_refused_before_it_is_encoded_and_encoded_beside_the_event_loop():
    encoded = []

    def slow(text):
        encoded.append(len(text))
        time.sleep(0.4 if len(text) > 3 * 4096 // 4 else 0.0)
        return [1] * (len(text) // 64)

    codec = TextCodec(slow, lambda ids, skip: text_of(ids), 64)
    limits = requests.RequestLimits(VOCAB, 256)
    with pytest.raises(requests.RefusedError, match=r"no text of more than 16,384 fits the 256 tokens"):
        await requests.read_generate(json.dumps({"text": "a" * 16_385}).encode(), codec, limits)
    assert encoded == []
    ticks = itertools.count()

    async def tick():
        while next(ticks) < 10_000:
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    batch = await requests.read_generate(json.dumps({"text": "a" * 8192}).encode(), codec, limits)
    assert len(batch.requests[0].prompt_ids) == 128
    assert next(ticks) > 5, "the event loop stood still"
    ticking.cancel()


async def test_copies_of_a_prompt_share_its_tokens():
    body = {"input_ids": [1] * 200, "sampling_params": {"n": 1024}}
    batch = await requests.read_generate(json.dumps(body).encode(), CODEC, requests.RequestLimits(VOCAB, 256))
    assert len({id(item.prompt_ids) for item in batch.requests}) == 1


@pytest.mark.parametrize("most", ["MAX_OF_CLIENT", "MAX_OF_ALL"])
async def test_pending_completions_are_bounded(monkeypatch, most):
    monkeypatch.setattr(pending, most, 10)
    async with embedded_server() as (url, engine), client_of(url) as http:
        engine.pause()
        first = asyncio.create_task(http.post("/generate", json=rules(n=8)))
        while engine.num_requests < 8:
            await asyncio.sleep(0.01)
        assert (await http.post("/generate", json=rules(n=3))).status_code == 503
        engine.resume()
        assert len((await first).json()) == 8
        assert (await http.post("/generate", json=rules(n=3))).status_code == 200


async def test_a_flood_of_one_client_keeps_no_other_one_waiting():
    async with embedded_server() as (url, engine), client_of(url) as flooding, client_of(url) as http:
        body = {"input_ids": [IDS] * 200, "sampling_params": {"max_new_tokens": 20}}
        flood = asyncio.create_task(flooding.post("/generate", json=body))
        while engine.num_requests < 200:
            await asyncio.sleep(0.005)
        left = []
        for _ in range(3):
            reply = await http.post("/generate", json=rules(max_new_tokens=20), headers={ROUTING_KEY: "mine"})
            assert reply.status_code == 200
            left.append(engine.num_requests)
        # Each of its completions waits as long as one takes, and takes as long: 4 slots end one each, twice.
        assert left[-1] > 200 - 3 * 4 * 4
        assert len((await flood).json()) == 200


async def test_a_client_ends_no_request_of_another_one():
    async with (
        embedded_server() as (url, engine),
        client_of(url) as http,
        client_of(url, **CONTROL) as trainer,
    ):
        body = {"input_ids": IDS, "sampling_params": {**LONG, "n": 2}, "rid": "abc"}
        running = asyncio.create_task(http.post("/generate", json=body))
        while engine.num_requests < 2:
            await asyncio.sleep(0.005)
        engine.pause()
        for rid in ("a", "ab", "abc_", "abc_0x", "b"):
            assert (await http.post("/abort_request", json={"rid": rid})).status_code == 200
        assert (await http.post("/abort_request", json={"abort_all": True})).status_code == 401
        assert engine.num_requests == 2
        assert (await http.post("/abort_request", json={"rid": "abc_0"})).status_code == 200
        await asyncio.sleep(0)
        assert engine.num_requests == 1
        assert (await trainer.post("/abort_request", json={"rid": "a"})).status_code == 200
        replies = (await running).json()
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies] == ["abort", "abort"]


CONTROLS = (
    *(("/pause_generation", {}), ("/continue_generation", {}), ("/flush_cache", {})),
    ("/update_weights_from_disk", {"model_path": "/"}),
    ("/update_weight_version", {"new_version": "7"}),
)


async def test_control_needs_the_key_and_a_get_changes_nothing():
    async with embedded_server() as (url, engine), client_of(url) as http:
        for path, body in CONTROLS:
            assert (await http.post(path, json=body)).status_code == 401, path
            assert (await http.get(path)).status_code == 405, path
        assert (engine.version, engine._paused) == (0, False)
        await Server(url, CONTROL).set_version(3)
        assert engine.version == 3
        with pytest.raises(EngineError, match="needs the header"):
            await Server(url).set_version(4)
        page = {"Origin": "https://www.w3.org"}
        assert (await http.post("/generate", json=rules(), headers=page)).status_code == 403
    async with embedded_server(checks=RequestChecks()) as (url, engine):
        with pytest.raises(EngineError, match="Control requests are off"):
            await Server(url, CONTROL).set_version(3)


def test_the_key_is_read_from_the_environment(monkeypatch):
    monkeypatch.delenv(CONTROL_KEY, raising=False)
    assert control_headers() == {}
    monkeypatch.setenv(CONTROL_KEY, KEY)
    assert control_headers() == CONTROL
    for unfit in ("short", "with spaces in the key", "é" * 20, "line\nbreak-in-the-key"):
        monkeypatch.setenv(CONTROL_KEY, unfit)
        with pytest.raises(ConfigError, match="at least 16 printable ASCII characters"):
            control_headers()


async def test_health_checks_at_the_same_time_sample_one_token():
    async with embedded_server() as (url, engine), client_of(url) as http:
        sampled = []
        generate = engine.generate

        async def counted(*arguments, **options):
            sampled.append(1)
            await asyncio.sleep(0.1)
            return await generate(*arguments, **options)

        engine.generate = counted
        replies = await asyncio.gather(*(http.get("/health_generate") for _ in range(20)))
        assert {reply.status_code for reply in replies} == {200}
        assert len(sampled) < 5
