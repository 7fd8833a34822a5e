"""The embedded engine over HTTP: what it answers, to SGLang's clients and to mistaken ones."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import numpy as np
import pytest

from agentrl.cli import main
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.wire import ROUTING_KEY
from agentrl.protocols import Sampling
from agentrl.serving import bound
from agentrl.types import Finish
from tests.engine.serving import embedded_server, save_tiny
from tests.engine.subjects import delivery_of, text_of, tiny

IDS = [1, 10, 20, 30]
PATIENCE_S = 30
GREEDY = {"temperature": 0, "max_new_tokens": 4}


@asynccontextmanager
async def asking(**changes):
    async with embedded_server(**changes) as (url, engine):
        limits = httpx2.Limits(keepalive_expiry=2)
        async with (
            httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30, limits=limits) as client,
            asyncio.timeout(PATIENCE_S),
        ):
            yield client, engine


async def generated(client, status=200, headers=None, **body):
    answer = await client.post("/generate", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_reply_is_what_sglang_replies():
    async with asking() as (client, engine):
        got = await generated(client, rid="r", input_ids=IDS, sampling_params=GREEDY, return_logprob=True)
        direct = await engine.generate(IDS, Sampling(4, temperature=0.0), session="direct")
        meta = got["meta_info"]
        assert meta.pop("e2e_latency") > 0
        assert got == {
            "text": text_of(got["output_ids"]),
            "output_ids": direct.token_ids.tolist(),
            "meta_info": {
                "id": "r",
                "finish_reason": {"type": "length", "length": 4},
                "prompt_tokens": 4,
                "completion_tokens": 4,
                "cached_tokens": 0,
                "weight_version": "0",
                "num_retractions": 0,
                "dp_rank": None,
                "input_token_logprobs": [],
                "output_token_logprobs": [
                    [float(logprob), token, None]
                    for logprob, token in zip(
                        direct.logprobs.tolist(), direct.token_ids.tolist(), strict=True
                    )
                ],
                "output_token_logprobs_length": 4,
            },
        }
        bare = await generated(client, input_ids=IDS, sampling_params=GREEDY)
        assert "output_token_logprobs" not in bare["meta_info"]
        text = await generated(client, text=text_of(IDS), sampling_params=GREEDY)
        assert text["output_ids"] == got["output_ids"]


async def test_stops_are_kept_among_the_tokens_and_cut_from_the_text():
    async with asking() as (client, _):
        free = await generated(client, input_ids=[7] * 3, sampling_params={**GREEDY, "max_new_tokens": 16})
        ids = free["output_ids"]
        string = text_of(ids[4:7])
        size = next(n for n in range(17) if string in text_of(ids[:n]))
        rule = {**GREEDY, "max_new_tokens": 16, "stop": string}
        got = await generated(client, input_ids=[7] * 3, sampling_params=rule)
        assert got["output_ids"] == ids[:size]
        assert got["text"] == text_of(ids[:size]).split(string)[0]
        assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": string}
        kept = await generated(client, input_ids=[7] * 3, sampling_params={**rule, "no_stop_trim": True})
        assert kept["text"] == text_of(ids[:size])
        token = await generated(
            client, input_ids=[7] * 3, sampling_params={**GREEDY, "stop_token_ids": [ids[0]]}
        )
        assert (token["output_ids"], token["text"]) == (ids[:1], "")
        assert token["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[0]}


async def test_lists_and_copies_are_answered_in_order():
    async with asking() as (client, _):
        prompts = [[n, n + 1] for n in range(5)]
        alone = [await generated(client, input_ids=one, sampling_params=GREEDY) for one in prompts]
        rules = [{**GREEDY, "max_new_tokens": 1 + n % 4} for n in range(5)]
        several = await generated(client, input_ids=prompts, sampling_params=rules, rid=list("abcde"))
        assert [one["meta_info"]["id"] for one in several] == list("abcde")
        assert [one["output_ids"] for one in several] == [
            one["output_ids"][: 1 + n % 4] for n, one in enumerate(alone)
        ]
        seeded = {"max_new_tokens": 20, "n": 3, "sampling_seed": 5}
        copies = await generated(client, input_ids=IDS, sampling_params=seeded)
        again = await generated(client, input_ids=IDS, sampling_params=seeded, rid="x")
        assert [one["output_ids"] for one in copies] == [one["output_ids"] for one in again]
        assert len({tuple(one["output_ids"]) for one in copies}) == 3
        assert [one["meta_info"]["id"] for one in again] == ["x_0", "x_1", "x_2"]


async def test_a_stream_grows_and_ends_with_the_whole_reply():
    async with asking() as (client, engine):
        rule = {"temperature": 0, "max_new_tokens": 200}
        whole = await generated(client, input_ids=IDS, sampling_params=rule, return_logprob=True)
        body = {"input_ids": IDS, "sampling_params": rule, "return_logprob": True, "stream": True}
        async with client.stream("POST", "/generate", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in answer.aiter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        sizes = [len(event["output_ids"]) for event in events]
        assert sizes == sorted(set(sizes))
        assert len(sizes) > 1
        assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["output_ids"] == whole["output_ids"]
        assert all(
            event["output_ids"] == whole["output_ids"][:n] for event, n in zip(events, sizes, strict=True)
        )
        async with client.stream("POST", "/generate", json=body) as answer:
            await anext(answer.aiter_lines())
        while engine.num_requests:
            await asyncio.sleep(0.01)


async def test_requests_of_one_routing_key_share_a_cache_and_never_disturb_each_other():
    async with asking() as (client, engine):
        first = await generated(client, headers={ROUTING_KEY: "e"}, input_ids=IDS, sampling_params=GREEDY)
        longer = [*IDS, *first["output_ids"], 5]
        turn = {"input_ids": longer, "sampling_params": GREEDY}
        again = await generated(client, headers={ROUTING_KEY: "e"}, **turn)
        assert again["meta_info"]["cached_tokens"] == len(longer) - 2
        other = await generated(client, headers={ROUTING_KEY: "f"}, **turn)
        assert other["meta_info"]["cached_tokens"] == 0
        assert (await client.post("/flush_cache")).status_code == 200
        flushed = await generated(client, headers={ROUTING_KEY: "e"}, **turn)
        assert flushed["meta_info"]["cached_tokens"] == 0
        (task,) = await running(client, engine)
        beside = await generated(client, headers={ROUTING_KEY: "r0"}, **turn)
        assert beside["output_ids"] == again["output_ids"]
        assert (await task)["meta_info"]["finish_reason"]["type"] == "length"


RULES = "sampling_params"
WRONG = [
    (b"{", "invalid JSON"),
    (b"[]", "the body"),
    (b"{}", "either `input_ids` or `text`"),
    ({"input_ids": [1], "text": "0"}, "either `input_ids` or `text`"),
    ({"input_ids": []}, "at least one token"),
    ({"input_ids": [[1], []]}, "at least one token"),
    ({"input_ids": "12"}, "`input_ids`"),
    ({"input_ids": [1.5]}, "`input_ids"),
    ({"input_ids": [61]}, "the model knows 0 to 60"),
    ({"input_ids": [-1]}, "the model knows 0 to 60"),
    ({"input_ids": [1], RULES: {"max_new_tokens": 0}}, "max_new_tokens"),
    ({"input_ids": [1], RULES: {"max_new_tokens": 256}}, "max_context_len = 256"),
    ({"input_ids": [1], RULES: {"temperature": -1}}, "temperature"),
    ({"input_ids": [1], RULES: {"top_p": 0}}, "top_p"),
    ({"input_ids": [1], RULES: {"stop": ""}}, "stop string"),
    ({"input_ids": [1], RULES: {"n": 5000}}, "`sampling_params.n`"),
    ({"input_ids": [[1]] * 9, RULES: {"n": 200}}, "at most 1024"),
    ({"input_ids": [1], RULES: {"min_p": 0.1}}, "does not do `min_p`"),
    ({"input_ids": [1], RULES: {"regex": "a"}}, "does not do `regex`"),
    ({"input_ids": [[1], [2]], RULES: [{}]}, "1 entries for 2 prompts"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "`rid`"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 0}, "no logprobs of prompts"),
    ({"input_ids": [1], "image_data": "x"}, "does not do `image_data`"),
    ({"input_ids": [1], "stream": "yes"}, "`stream`"),
]


async def test_a_wrong_request_is_one_sentence():
    async with asking() as (client, engine):
        for body, sentence in WRONG:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await client.post("/generate", content=content)
            assert answer.status_code == 400, (body, answer.text)
            told = answer.json()["error"]["message"]
            assert sentence in told, (body, told)
            assert "\n" not in told
        neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "regex": None, "top_k": -1}
        await generated(client, input_ids=[1], sampling_params={**GREEDY, **neutral}, unknown=1)
        assert (await client.get("/generate")).json() == {"error": {"message": "Method Not Allowed"}}
        assert (await client.get("/nowhere")).status_code == 404
        assert engine.num_requests == 0


async def test_a_body_without_end_is_refused():
    async with asking(max_body_bytes=100) as (client, _):
        answer = await client.post("/generate", content=b" " * 101)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            413,
            "A request has at most 100 bytes.",
        )


async def running(client, engine, count=1):
    """Requests that run, each with some tokens already."""
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 240, "sampling_seed": 3}}
    tasks = [
        asyncio.create_task(generated(client, rid=f"r{n}", headers={ROUTING_KEY: f"r{n}"}, **body))
        for n in range(count)
    ]
    while not all(sampled(engine, n) for n in range(count)):
        await asyncio.sleep(0)
    return tasks


def sampled(engine, number=0):
    """The tokens that a running request has so far."""
    completion = engine.partial_completion(f"key r{number}")
    return [] if completion is None else completion.token_ids.tolist()


async def test_an_abort_ends_those_it_names_with_what_they_have():
    async with asking() as (client, engine):
        tasks = await running(client, engine, 2)
        duplicate = await generated(client, 400, rid="r0", input_ids=IDS)
        assert duplicate["error"]["message"] == "Duplicate request ID detected: r0"
        for body in ({"rid": "zz"}, {"rid": ""}, {}, {"rid": "r1"}):
            answer = await client.post("/abort_request", json=body)
            assert (answer.status_code, answer.content) == (200, b"")
        got = await tasks[1]
        assert got["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(got["output_ids"]) < 240
        assert not tasks[0].done()
        await client.post("/abort_request", json={"abort_all": True})
        assert (await tasks[0])["meta_info"]["finish_reason"]["type"] == "abort"


async def test_what_a_client_that_is_gone_asked_for_is_ended():
    async with asking() as (client, engine):
        (task,) = await running(client, engine)
        engine.pause()
        task.cancel()
        async with asyncio.timeout(10):
            while engine.num_requests:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_pause_holds_everything_at_a_token_and_goes_on_from_there(mode):
    async with asking() as (client, engine):
        free = await generated(
            client, input_ids=IDS, sampling_params={"max_new_tokens": 240, "sampling_seed": 3}
        )
        (task,) = await running(client, engine)
        assert (await client.post("/pause_generation", json={"mode": mode})).status_code == 200
        later = asyncio.create_task(generated(client, input_ids=IDS, sampling_params=GREEDY))
        while engine.num_requests < (1 if mode == "abort" else 2):
            await asyncio.sleep(0)
        before = sampled(engine)
        await asyncio.sleep(0.05)
        assert sampled(engine) == before
        assert not later.done()
        assert (await client.get("/health_generate")).status_code == 200
        flushed = await client.post("/flush_cache")
        assert flushed.status_code == (200 if mode == "abort" else 400)
        assert (await client.post("/continue_generation", json={})).status_code == 200
        got = await task
        assert len((await later)["output_ids"]) == 4
        if mode == "abort":
            assert got["meta_info"]["finish_reason"]["type"] == "abort"
            assert got["output_ids"] == free["output_ids"][: len(got["output_ids"])]
        else:
            assert got["output_ids"] == free["output_ids"]


async def test_weights_from_disk_serve_under_their_version_and_every_token_has_its_own(tmp_path):
    folder = save_tiny(tmp_path / "one", seed=1)
    async with asking() as (client, engine):
        policy = SGLangPolicy(str(client.base_url))
        rule = Sampling(240, seed=3)
        task = asyncio.create_task(policy.generate(IDS, rule, session="a"))
        while engine.partial_completion("key a") is None:
            await asyncio.sleep(0)
        update = {"model_path": str(folder), "weight_version": "7"}
        told = await client.post("/update_weights_from_disk", json=update)
        assert told.json()["success"], told.text
        got = await task
        assert got.finish is Finish.LENGTH
        assert set(got.versions.tolist()) <= {0, 7}
        assert (np.diff(got.versions) >= 0).all()
        after = await policy.generate(IDS, Sampling(4, temperature=0.0), session="b")
        assert (policy.version, set(after.versions.tolist())) == (7, {7})
        assert (await client.get("/model_info")).json()["weight_version"] == "7"
        same = await client.post("/update_weights_from_disk", json={"model_path": str(folder)})
        assert same.json()["message"].endswith("updated to 7.")
        for wrong, sentence in (
            ({"model_path": str(tmp_path)}, "holds no config.json"),
            ({"model_path": str(folder), "weight_version": "blue"}, "whole number"),
            ({"model_path": str(folder), "load_format": "dummy"}, "`load_format`"),
            ({}, "`model_path`"),
        ):
            answer = await client.post("/update_weights_from_disk", json=wrong)
            assert (answer.status_code, sentence in answer.text) == (400, True), answer.text
        assert engine.version == 7
        await policy.close()


async def test_a_request_across_an_update_tells_the_version_of_each_token():
    async with asking() as (client, engine):
        (task,) = await running(client, engine)
        delivery = delivery_of(tiny("qwen3", 1))
        async with engine.sink.begin(delivery.manifest, 5) as transaction:
            for bucket in delivery.buckets:
                await transaction.put(bucket)
            await transaction.commit(delivery.checksum)
        meta = (await task)["meta_info"]
        assert meta["weight_version"] == "5"
        assert set(meta["output_token_versions"]) == {"0", "5"}
        assert len(meta["output_token_versions"]) == 240


async def test_the_server_tells_who_it_is():
    async with asking(max_context_len=64) as (client, _):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health_generate")).status_code == 200
        info = (await client.get("/server_info")).json()
        assert (info["context_length"], info["max_running_requests"]) == (64, 4)
        assert (await client.get("/get_model_info")).json()["weight_version"] == "0"
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 64)


async def test_a_broken_engine_is_an_error_of_the_server(monkeypatch):
    async with asking() as (client, engine):

        def broken():
            raise RuntimeError("no memory")

        monkeypatch.setattr(engine._stepper, "step", broken)
        told = await generated(client, 500, input_ids=IDS)
        assert "no memory" in told["error"]["message"]
        assert (await client.get("/health_generate")).status_code == 503


def test_a_taken_port_and_a_wrong_model_are_one_sentence(capsys, tmp_path):
    with bound("127.0.0.1", 0) as holder:
        holder.listen()
        port = str(holder.getsockname()[1])
        for arguments, sentence in (
            ([str(tmp_path), "--port", port], "cannot be used"),
            ([str(tmp_path), "--port", "0"], "holds no config.json"),
            ([str(tmp_path), "--port", "x"], "`serve.port` = 'x'"),
        ):
            with pytest.raises(SystemExit) as left:
                main(["serve", *arguments])
            assert left.value.code == 2
            assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_the_command_serves_and_ends_cleanly_in_mid_generation(tmp_path, number):
    command = [Path(sys.executable).parent / "agentrl", "serve", save_tiny(tmp_path), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        told = json.loads(server.stdout.readline())
        assert told["max_context_len"] == 256
        body = {"text": "01", "sampling_params": {"max_new_tokens": 200}, "stream": True}
        with httpx2.stream("POST", f"{told['url']}/generate", json=body, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        out, err = server.communicate(timeout=30)
    assert (server.returncode, out, err) == (0, "", "")


async def test_weights_can_be_called_by_another_version():
    async with asking() as (client, engine):
        for version, status in (("7", 200), ("seven", 400)):
            body = {"new_version": version, "abort_all_requests": False}
            assert (await client.post("/update_weight_version", json=body)).status_code == status
        assert engine.version == 7
        got = await generated(client, input_ids=IDS, sampling_params=GREEDY)
        assert got["meta_info"]["weight_version"] == "7"
