"""The embedded engine over HTTP: its replies to SGLang's clients, and to wrong requests."""

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
from agentrl.http.serving import bound
from agentrl.types import Finish
from agentrl.types.seams import Sampling
from tests.engine.serving import CONTROL, embedded_server, save_tiny, session_of
from tests.engine.subjects import delivery_of, text_of, tiny

IDS = [1, 10, 20, 30]
PATIENCE_S = 30
GREEDY = {"temperature": 0, "max_new_tokens": 4}
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def connect(**changes):
    async with embedded_server(**changes) as (url, engine):
        limits = httpx2.Limits(keepalive_expiry=2)
        async with (
            httpx2.AsyncClient(
                base_url=url, trust_env=False, timeout=30, limits=limits, headers=JSON | CONTROL
            ) as client,
            asyncio.timeout(PATIENCE_S),
        ):
            yield client, engine


async def generated(client, status=200, headers=None, **body):
    answer = await client.post("/generate", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_reply_is_what_sglang_replies():
    async with connect() as (client, engine):
        reply = await generated(client, rid="r", input_ids=IDS, sampling_params=GREEDY, return_logprob=True)
        direct = await engine.generate(IDS, Sampling(4, temperature=0.0), session="direct")
        meta = reply["meta_info"]
        parts = [meta.pop("forward_entry_time"), meta.pop("prefill_finished_time")]
        parts.append(meta.pop("request_finished_ts"))
        assert parts == sorted(parts)
        assert 0 < meta.pop("queue_time") + parts[2] - parts[0] <= meta.pop("e2e_latency") + 1e-3
        assert reply == {
            "text": text_of(reply["output_ids"]),
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
        minimal = await generated(client, input_ids=IDS, sampling_params=GREEDY)
        assert "output_token_logprobs" not in minimal["meta_info"]
        text = await generated(client, text=text_of(IDS), sampling_params=GREEDY)
        assert text["output_ids"] == reply["output_ids"]


async def test_stops_are_in_the_tokens_and_trimmed_from_the_text():
    async with connect() as (client, _):
        free = await generated(client, input_ids=[7] * 3, sampling_params={**GREEDY, "max_new_tokens": 16})
        ids = free["output_ids"]
        string = text_of(ids[4:7])
        size = next(n for n in range(17) if string in text_of(ids[:n]))
        rule = {**GREEDY, "max_new_tokens": 16, "stop": string}
        reply = await generated(client, input_ids=[7] * 3, sampling_params=rule)
        assert reply["output_ids"] == ids[:size]
        assert reply["text"] == text_of(ids[:size]).split(string)[0]
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": string}
        untrimmed = await generated(client, input_ids=[7] * 3, sampling_params={**rule, "no_stop_trim": True})
        assert untrimmed["text"] == text_of(ids[:size])
        token = await generated(
            client, input_ids=[7] * 3, sampling_params={**GREEDY, "stop_token_ids": [ids[0]]}
        )
        assert (token["output_ids"], token["text"]) == (ids[:1], "")
        assert token["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[0]}


async def test_lists_and_copies_are_answered_in_order():
    async with connect() as (client, _):
        prompts = [[n, n + 1] for n in range(5)]
        single = [await generated(client, input_ids=prompt, sampling_params=GREEDY) for prompt in prompts]
        rules = [{**GREEDY, "max_new_tokens": 1 + n % 4} for n in range(5)]
        several = await generated(client, input_ids=prompts, sampling_params=rules, rid=list("abcde"))
        assert [reply["meta_info"]["id"] for reply in several] == list("abcde")
        assert [reply["output_ids"] for reply in several] == [
            reply["output_ids"][: 1 + n % 4] for n, reply in enumerate(single)
        ]
        seeded = {"max_new_tokens": 20, "n": 3, "sampling_seed": 5}
        copies = await generated(client, input_ids=IDS, sampling_params=seeded)
        again = await generated(client, input_ids=IDS, sampling_params=seeded, rid="x")
        assert [reply["output_ids"] for reply in copies] == [reply["output_ids"] for reply in again]
        assert len({tuple(reply["output_ids"]) for reply in copies}) == 3
        assert [reply["meta_info"]["id"] for reply in again] == ["x_0", "x_1", "x_2"]


async def test_a_stream_grows_and_ends_with_the_complete_reply():
    async with connect() as (client, engine):
        rule = {"temperature": 0, "max_new_tokens": 200}
        complete = await generated(client, input_ids=IDS, sampling_params=rule, return_logprob=True)
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
        assert events[-1]["output_ids"] == complete["output_ids"]
        assert all(
            event["output_ids"] == complete["output_ids"][:n] for event, n in zip(events, sizes, strict=True)
        )
        async with client.stream("POST", "/generate", json=body) as answer:
            await anext(answer.aiter_lines())
        while engine.num_requests:
            await asyncio.sleep(0.01)


async def test_requests_of_one_routing_key_share_a_cache_and_may_run_concurrently():
    async with connect() as (client, engine):
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
        (task,) = await start_requests(client, engine)
        concurrent = await generated(client, headers={ROUTING_KEY: "r0"}, **turn)
        assert concurrent["output_ids"] == again["output_ids"]
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
    ({"input_ids": [61]}, "the vocabulary is 0 to 60"),
    ({"input_ids": [-1]}, "the vocabulary is 0 to 60"),
    ({"input_ids": [1], RULES: {"max_new_tokens": -1}}, "max_new_tokens"),
    ({"input_ids": [1], RULES: {"max_new_tokens": 256}}, "max_context_len = 256"),
    ({"input_ids": [1], RULES: {"temperature": -1}}, "temperature"),
    ({"input_ids": [1], RULES: {"top_p": 0}}, "top_p"),
    ({"input_ids": [1], RULES: {"stop": ""}}, "`sampling_params.stop`"),
    ({"input_ids": [1], RULES: {"n": 5000}}, "`sampling_params.n`"),
    ({"input_ids": [[1]] * 9, RULES: {"n": 200}}, "at most 1024"),
    ({"input_ids": [1], RULES: {"min_p": 0.1}}, "does not do `min_p`"),
    ({"input_ids": [[1], [2]], RULES: [{}]}, "1 entries for 2 prompts"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "`rid`"),
    ({"input_ids": [1], "return_logprob": True, "logprob_start_len": -2}, "`logprob_start_len` is -2"),
    ({"input_ids": [1], "image_data": "x"}, "does not do `image_data`"),
    ({"input_ids": [1], "top_logprobs_num": 2}, "a router has dropped that: send requests to the server"),
    ({"input_ids": [1], "stream": "yes"}, "`stream`"),
]


async def test_a_wrong_request_is_one_sentence():
    async with connect() as (client, engine):
        for body, sentence in WRONG:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await client.post("/generate", content=content)
            assert answer.status_code == 400, (body, answer.text)
            message = answer.json()["error"]["message"]
            assert sentence in message, (body, message)
            assert "\n" not in message
        neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "regex": None, "top_k": -1}
        await generated(client, input_ids=[1], sampling_params={**GREEDY, **neutral}, unknown=1)
        assert (await client.get("/generate")).json() == {"error": {"message": "Method Not Allowed"}}
        assert (await client.get("/nowhere")).status_code == 404
        assert engine.num_requests == 0


async def test_a_body_without_end_is_refused():
    async with connect(max_body_bytes=100) as (client, _):
        answer = await client.post("/generate", content=b" " * 101)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            413,
            "A request has at most 100 bytes.",
        )


async def start_requests(client, engine, count=1):
    """Start requests, and wait until each has some tokens."""
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 240, "sampling_seed": 3}}
    tasks = [
        asyncio.create_task(generated(client, rid=f"r{n}", headers={ROUTING_KEY: f"r{n}"}, **body))
        for n in range(count)
    ]
    while not all(partial_tokens(engine, n) for n in range(count)):
        await asyncio.sleep(0)
    return tasks


def partial_tokens(engine, number=0):
    """The tokens of a running request so far."""
    completion = engine.scheduler.partial_completion(session_of(f"r{number}"))
    return [] if completion is None else completion.token_ids.tolist()


async def test_an_abort_ends_the_matching_requests_with_their_tokens_so_far():
    async with connect() as (client, engine):
        tasks = await start_requests(client, engine, 2)
        duplicate = await generated(client, 400, rid="r0", input_ids=IDS)
        assert duplicate["error"]["message"] == "Duplicate request ID detected: r0"
        for body in ({"rid": "zz"}, {"rid": ""}, {}, {"rid": "r1"}):
            answer = await client.post("/abort_request", json=body)
            assert (answer.status_code, answer.content) == (200, b"")
        reply = await tasks[1]
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(reply["output_ids"]) < 240
        assert not tasks[0].done()
        await client.post("/abort_request", json={"abort_all": True})
        assert (await tasks[0])["meta_info"]["finish_reason"]["type"] == "abort"


async def test_requests_of_a_disconnected_client_are_aborted():
    async with connect() as (client, engine):
        (task,) = await start_requests(client, engine)
        engine.pause()
        task.cancel()
        async with asyncio.timeout(10):
            while engine.num_requests:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_pause_stops_at_a_token_and_a_resume_continues_there(mode):
    async with connect() as (client, engine):
        free = await generated(
            client, input_ids=IDS, sampling_params={"max_new_tokens": 240, "sampling_seed": 3}
        )
        (task,) = await start_requests(client, engine)
        assert (await client.post("/pause_generation", json={"mode": mode})).status_code == 200
        later = asyncio.create_task(generated(client, input_ids=IDS, sampling_params=GREEDY))
        while engine.num_requests < (1 if mode == "abort" else 2):
            await asyncio.sleep(0)
        before = partial_tokens(engine)
        await asyncio.sleep(0.05)
        assert partial_tokens(engine) == before
        assert not later.done()
        assert (await client.get("/health_generate")).status_code == 200
        flushed = await client.post("/flush_cache")
        assert flushed.status_code == (200 if mode == "abort" else 400)
        assert (await client.post("/continue_generation", json={})).status_code == 200
        reply = await task
        assert len((await later)["output_ids"]) == 4
        if mode == "abort":
            assert reply["meta_info"]["finish_reason"]["type"] == "abort"
            assert reply["output_ids"] == free["output_ids"][: len(reply["output_ids"])]
        else:
            assert reply["output_ids"] == free["output_ids"]


async def test_weights_from_disk_serve_under_their_version_and_every_token_has_its_own(tmp_path):
    folder = save_tiny(tmp_path / "one", seed=1)
    async with connect() as (client, engine):
        policy = SGLangPolicy(str(client.base_url))
        rule = Sampling(240, seed=3)
        task = asyncio.create_task(policy.generate(IDS, rule, session="a"))
        while engine.scheduler.partial_completion(session_of("a", "0")) is None:
            await asyncio.sleep(0)
        update = {"model_path": str(folder), "weight_version": "7"}
        response = await client.post("/update_weights_from_disk", json=update)
        assert response.json()["success"], response.text
        completion = await task
        assert completion.finish is Finish.LENGTH
        assert set(completion.versions.tolist()) <= {0, 7}
        assert (np.diff(completion.versions) >= 0).all()
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


async def test_a_request_across_an_update_reports_the_version_of_each_token():
    async with connect() as (client, engine):
        (task,) = await start_requests(client, engine)
        delivery = delivery_of(tiny("qwen3", 1))
        async with engine.sink.begin(delivery.manifest, 5) as transaction:
            for bucket in delivery.buckets:
                await transaction.put(bucket)
            await transaction.commit(delivery.checksum)
        meta = (await task)["meta_info"]
        assert meta["weight_version"] == "5"
        assert set(meta["output_token_versions"]) == {"0", "5"}
        assert len(meta["output_token_versions"]) == 240


async def test_the_server_reports_its_model_and_limits():
    async with connect(max_context_len=64) as (client, _):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health_generate")).status_code == 200
        info = (await client.get("/server_info")).json()
        assert (info["context_length"], info["max_running_requests"]) == (64, 4)
        assert (await client.get("/get_model_info")).json()["weight_version"] == "0"
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 64)


async def test_a_broken_engine_is_an_error_of_the_server(monkeypatch):
    async with connect() as (client, engine):

        def broken():
            raise RuntimeError("no memory")

        monkeypatch.setattr(engine._stepper, "step", broken)
        reply = await generated(client, 500, input_ids=IDS)
        assert "no memory" in reply["error"]["message"]
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
            with pytest.raises(SystemExit) as caught:
                main(["serve", *arguments])
            assert caught.value.code == 2
            assert sentence in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_the_command_serves_and_ends_cleanly_in_mid_generation(tmp_path, number):
    command = [Path(sys.executable).parent / "agentrl", "serve", save_tiny(tmp_path), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        info = json.loads(server.stdout.readline())
        assert info["max_context_len"] == 256
        body = {"text": "01", "sampling_params": {"max_new_tokens": 200}, "stream": True}
        with httpx2.stream("POST", f"{info['url']}/generate", json=body, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(number)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        out, err = server.communicate(timeout=30)
    assert (server.returncode, out, err) == (0, "", "")


async def test_the_version_of_weights_can_be_changed():
    async with connect() as (client, engine):
        for version, status in (("7", 200), ("seven", 400)):
            body = {"new_version": version, "abort_all_requests": False}
            assert (await client.post("/update_weight_version", json=body)).status_code == status
        assert engine.version == 7
        reply = await generated(client, input_ids=IDS, sampling_params=GREEDY)
        assert reply["meta_info"]["weight_version"] == "7"
