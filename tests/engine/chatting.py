"""A server of a tiny model that speaks a published chat template, and its scripted turns."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import lru_cache

import httpx2
import numpy as np

from agentrl.assembly.serve import chat_of, codec_of
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served.app import EngineApp
from agentrl.http.serving import RequestChecks
from agentrl.types import Completion, Finish
from tests.engine.serving import CONTROL, KEY
from tests.engine.subjects import tiny
from tests.listening import listening
from tests.rendering.real_templates import real_tokenizer

JSON = {"Content-Type": "application/json"}
ASK = [{"role": "user", "content": "What is 12 and 30?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}
TALK = [
    {"role": "system", "content": "Be brief."},
    *ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
]


@lru_cache
def renderer_of(family="qwen3"):
    return chat_of(real_tokenizer(family))


def ids_of(text, family="qwen3"):
    return real_tokenizer(family).encode(text, add_special_tokens=False)


@asynccontextmanager
async def chat_server(family="qwen3", *, max_context_len=512, **changes):
    """Yields a client and the engine. The prompts that the engine received are in `engine.prompts`."""
    tokenizer = real_tokenizer(family)
    model = tiny("qwen3", vocab_size=len(tokenizer), max_position_embeddings=1024)
    codec = codec_of(tokenizer)
    engine = EmbeddedEngine.from_model(
        model,
        max_slots=4,
        max_context_len=max_context_len,
        decode=lambda ids: codec.decode(ids, False),
    )
    settings = {"renderer": renderer_of(family), "checks": RequestChecks(control_key=KEY), **changes}
    sample, engine.prompts = engine.generate, []

    async def recorded(prompt_ids, sampling, **more):
        engine.prompts.append((list(prompt_ids), sampling))
        return await sample(prompt_ids, sampling, **more)

    engine.generate = recorded
    app = EngineApp(engine, codec, name="tiny", **settings)
    async with (
        listening(app.app) as url,
        httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60, headers=JSON | CONTROL) as client,
    ):
        yield client, engine


def scripted(engine, text, finish=Finish.STOP, matched=None):
    """Has the engine complete every prompt with a text."""
    ids = np.asarray(ids_of(text), np.int32)

    async def generate(prompt_ids, sampling, **more):
        del more
        engine.prompts.append((list(prompt_ids), sampling))
        versions = np.zeros_like(ids)
        return Completion(ids, np.full(len(ids), -0.5, np.float32), versions, finish, matched)

    engine.generate = generate


async def chat(client, status=200, **body):
    answer = await client.post("/v1/chat/completions", json={"model": "m", "messages": ASK, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


async def streamed(client, **body):
    """The chunks of a stream, the last line checked."""
    content = {"model": "m", "messages": ASK, "stream": True, **body}
    async with client.stream("POST", "/v1/chat/completions", json=content) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(chunks, index=0):
    """The message and the `finish_reason` that the deltas of a choice make."""
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
    message = {"role": parts[0]["delta"]["role"]}
    for part in parts:
        for name in ("content", "reasoning_content"):
            if part["delta"].get(name):
                message[name] = message.get(name, "") + part["delta"][name]
        for call in part["delta"].get("tool_calls", ()):
            message.setdefault("tool_calls", []).append(call["function"])
    return message, parts[-1]["finish_reason"]
