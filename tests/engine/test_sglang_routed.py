"""The experts of a request's tokens over SGLang's protocol: whole requests, turns, parts, and bad replies."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import numpy as np
import pytest

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served.app import EngineApp
from agentrl.engine.sglang import SGLangPolicy, wire
from agentrl.engine.sglang.launch import ServerSettings
from agentrl.engine.sglang.launch.router import RouterProcess
from agentrl.engine.sglang.request import Draft
from agentrl.engine.sglang.transports.inside import LOADER_FOLDER, plugin_folder
from agentrl.errors import ConfigError, EngineError
from agentrl.types import ExpertLayers
from agentrl.types.seams import Sampling
from tests.engine.routes import expect_routes
from tests.engine.serving import (
    CODEC,
    ScriptedServer,
    embedded_server,
    generated,
    listening,
    sglang_python,
)
from tests.engine.subjects import text_of
from tests.engine.test_routed_experts import rule_of
from tests.trainer.megatron.models import model_of

LAYERS = ExpertLayers((1, 3), 4, 2)
ENDED = {"type": "abort", "message": "Aborted"}
ASKING = Sampling(4, return_routed_experts=LAYERS, routed_experts_start_len=1)
PROMPT = [7, 8, 9]


def experts_of(position: int, layer: int) -> list[int]:
    """The experts that the scripted servers say, of a position in a layer."""
    return [10 * position + layer, 1000 + 10 * position + layer]


def sent(start: int, end: int) -> str:
    """What SGLang sends of the positions from `start` to `end`, 0 in layers without experts."""
    rows = [
        [experts_of(place, layer) if layer in LAYERS.numbers else [0, 0] for layer in range(4)]
        for place in range(start, end)
    ]
    return base64.b64encode(np.array(rows, np.int32).reshape(-1, 4, 2).tobytes()).decode()


def drafted(sampling: Sampling, *replies: dict) -> Draft:
    draft = Draft(sampling, text_of, len(PROMPT))
    for reply in replies:
        draft.add(wire.read(wire.GenerateReply, json.dumps(reply).encode(), "the reply"))
    return draft


def expect_known(completion, positions) -> None:
    """It has the experts of these positions, and of no others."""
    rows = np.concatenate(
        [part["routed_experts"].values for part in (completion.prompt_extras, completion.extras)]
    )
    for place, row in enumerate(rows, start=1):
        expected = [experts_of(place, layer) for layer in LAYERS.numbers]
        assert row.tolist() == (expected if place in positions else [[-1, -1]] * 2), place


def test_a_reply_has_the_experts_of_all_tokens_but_the_last():
    completion = drafted(ASKING, generated([4, 5, 6, 7], routed_experts=sent(1, 6))).completion()
    assert len(completion.prompt_extras["routed_experts"]) == 2
    expect_known(completion, range(1, 6))


async def test_each_part_of_a_request_asks_for_those_that_are_missing():
    """A part that ended before it had a slot has none; the last token of a part is routed in the next one."""
    server = ScriptedServer(
        generated([4, 5], ENDED, routed_experts=sent(1, 4)),
        generated([], ENDED),
        generated([6, 7], routed_experts=sent(4, 6)),
    )
    async with server.listening() as url:
        completion = await SGLangPolicy(url).generate(PROMPT, ASKING, session="a")
    assert [request["routed_experts_start_len"] for request in server.requests] == [1, 4, 4]
    assert all(request["return_routed_experts"] is True for request in server.requests)
    expect_known(completion, range(1, 6))


def test_a_completion_that_goes_on_keeps_what_it_had():
    begun = drafted(ASKING, generated([4, 5], ENDED, routed_experts=sent(1, 4))).completion()
    expect_known(begun, range(1, 4))
    draft = drafted(replace(ASKING, continues=begun))
    assert draft.rest.routed_experts_start_len == 4
    draft.add(
        wire.read(
            wire.GenerateReply,
            json.dumps(generated([6, 7], routed_experts=sent(4, 6))).encode(),
            "the reply",
        )
    )
    expect_known(draft.completion(), range(1, 6))
    # One that began without them asks for all.
    plain = replace(begun, extras={}, prompt_extras={})
    assert drafted(replace(ASKING, continues=plain)).rest.routed_experts_start_len == 1


@pytest.mark.parametrize(
    ("meta", "error", "sentence"),
    [
        ({}, ConfigError, "--enable-return-routed-experts"),
        ({"routed_experts": sent(1, 7)}, EngineError, "another model"),
        ({"routed_experts": sent(2, 6)}, EngineError, "another model"),
        ({"routed_experts": "no base64"}, EngineError, "no base64"),
        ({"routed_experts": "AAAA"}, EngineError, "no base64 of int32"),
    ],
)
def test_a_reply_without_the_right_experts_is_refused(meta, error, sentence):
    with pytest.raises(error, match=sentence):
        drafted(ASKING, generated([4, 5, 6, 7], **meta))


def test_who_does_not_ask_gets_none():
    completion = drafted(Sampling(1), generated([4], routed_experts="?")).completion()
    assert not completion.extras
    assert not completion.prompt_extras
    assert "return_routed_experts" not in json.loads(wire.generate_body("r", [1], Sampling(1)))


def test_the_reply_to_a_long_prompt_is_within_its_bounds():
    layers = ExpertLayers(tuple(range(3, 61)), 61, 8)
    rule = Sampling(10, return_routed_experts=layers, routed_experts_start_len=100)
    text = base64.b64encode(np.full((4_000 + 10 - 101, 61, 8), 255, np.int32).tobytes()).decode()
    body = json.dumps(generated([151_000] * 10, routed_experts=text)).encode()
    assert len(body) <= wire.bounds_of(rule, 4_000).max_bytes < 1.3 * len(body)


@asynccontextmanager
async def mixture_served() -> AsyncIterator[tuple[str, EmbeddedEngine]]:
    engine = EmbeddedEngine.from_model(model_of("qwen3_moe"), max_slots=2, max_context_len=80, decode=text_of)
    async with listening(EngineApp(engine, CODEC, name="tiny").app) as url:
        yield url, engine


async def converse(policy: SGLangPolicy, number: int) -> None:
    """Three turns, each of which asks for the experts that the ones before have not brought."""
    model, rng = model_of("qwen3_moe"), np.random.default_rng(number)
    prefix, start = rng.integers(0, 97, 9).tolist(), 0
    for turn in range(3):
        rule = rule_of(model, 5, turn, start)
        completion = await policy.generate(prefix, rule, session=str(number))
        expect_routes(model, prefix, completion, start)
        start = len(prefix) + len(completion.token_ids) - 1
        prefix += [*completion.token_ids.tolist(), *rng.integers(0, 97, 4).tolist()]


async def test_turns_over_http_have_the_experts_of_every_prefix():
    async with mixture_served() as (url, _):
        policy = SGLangPolicy(url)
        await asyncio.gather(*(converse(policy, number) for number in range(3)))


@pytest.mark.full
async def test_turns_behind_a_router_have_them_too(tmp_path, monkeypatch):
    played, generate = set(), EmbeddedEngine.generate

    async def noting(engine, *arguments, **more):
        played.add(engine)
        return await generate(engine, *arguments, **more)

    monkeypatch.setattr(EmbeddedEngine, "generate", noting)
    router = RouterProcess(
        ServerSettings(model=tmp_path, log_folder=tmp_path, device="cpu", python=sglang_python())
    )
    async with mixture_served() as (one, first), mixture_served() as (two, second):
        await router.start()
        try:
            await router.add(one)
            await router.add(two)
            policy = SGLangPolicy(router.url, is_routed=True)
            await asyncio.gather(*(converse(policy, number) for number in range(8)))
            assert played == {first, second}
            # It drops the fields of the protocol itself.
            with pytest.raises(ConfigError, match="without a router before it"):
                await converse(SGLangPolicy(router.url), 0)
        finally:
            await router.stop()


ASKED = """
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
HookRegistry.apply_hooks()
from sglang.srt.managers.io_struct import GenerateReqInput
for session in ({"routed_experts_start_len": 3}, {"id": "a"}, {"routed_experts_start_len": "3"}, None):
    request = GenerateReqInput(input_ids=[1, 2, 3, 4], sampling_params={}, session_params=session)
    request.normalize_batch_and_arguments()
    print(request.return_routed_experts, request.routed_experts_start_len, request.session_params)
"""


@pytest.mark.full
def test_a_real_sglang_takes_them_from_the_session(tmp_path):
    folders = (plugin_folder(tmp_path / "plugin"), LOADER_FOLDER)
    python_path = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "CUDA_VISIBLE_DEVICES": ""}
    command = [str(sglang_python()), "-c", ASKED]
    done = subprocess.run(
        command, env={**os.environ, **python_path}, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-4:] == [
        *("True 3 None", "False 0 {'id': 'a'}", "False 0 {'routed_experts_start_len': '3'}", "False 0 None"),
    ], done.stderr


async def test_what_a_session_asks_for_is_bounded():
    async with mixture_served() as (url, _), httpx2.AsyncClient(trust_env=False) as client:
        for session in ({"routed_experts_start_len": 2}, {"id": "a"}, {"routed_experts_start_len": -1}):
            body = {"input_ids": [1], "session_params": session}
            reply = await client.post(f"{url}/generate", json=body)
            assert reply.status_code == 400, reply.text


async def test_a_server_of_a_model_without_experts_refuses():
    async with embedded_server() as (url, _):
        with pytest.raises(EngineError, match="no experts to return"):
            await SGLangPolicy(url).generate([1, 2], replace(ASKING, routed_experts_start_len=0), session="a")
    async with mixture_served() as (url, _):
        with pytest.raises(EngineError, match="a place in the prompt"):
            await SGLangPolicy(url).generate([1], replace(ASKING, routed_experts_start_len=2), session="a")
