"""`agentrl serve` as a chat endpoint: against transformers, OpenAI's own client, and ours."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import openai
import pytest

from agentrl import Task, play
from agentrl.engine.chat.agent import ChatAgent
from agentrl.engine.chat.endpoint import ChatEndpoint
from agentrl.engine.chat.settings import ChatSettings
from agentrl.engine.served import chat_wire
from agentrl.engine.served.chat_replies import Deltas, ReplyTurn
from agentrl.types import Ending
from tests.engine.chatting import (
    ADD,
    ASK,
    CALL,
    CALLED,
    TALK,
    chat,
    chat_server,
    ids_of,
    joined,
    renderer_of,
    scripted,
    streamed,
)
from tests.engine.serving import embedded_server
from tests.rendering.real_templates import real_tokenizer
from tests.worlds import Parrot

SUM = Task.ask("t", "How many are 11 and 1?", "12")


def as_template_takes_it(messages):
    """The same messages as transformers documents them: text, and arguments as objects."""
    plain = json.loads(json.dumps(messages))
    for message in plain:
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return plain


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5"])
async def test_the_prompt_is_that_of_the_chat_template(family):
    async with chat_server(family, max_context_len=1024) as (client, engine):
        talks = ((ASK, None), (TALK[:2], None), (ASK, [ADD]), (TALK, [ADD]))
        for messages, tools in talks:
            more = {} if tools is None else {"tools": tools}
            reply = await chat(client, messages=messages, max_tokens=2, **more)
            expected = real_tokenizer(family).apply_chat_template(
                as_template_takes_it(messages), tools=tools, add_generation_prompt=True, return_dict=False
            )
            assert engine.prompts[-1][0] == expected
            assert reply["usage"]["prompt_tokens"] == len(expected)
        # As without tools: the model is not asked for a call that the client would refuse.
        await chat(client, tools=[ADD], tool_choice="none", max_tokens=2)
        assert engine.prompts[-1][0] == engine.prompts[0][0]
        developer = [{**TALK[0], "role": "developer"}, TALK[1]]
        await chat(client, messages=developer, max_tokens=2)
        assert engine.prompts[-1][0] == engine.prompts[1][0]


async def test_a_reply_has_usage_logprobs_and_the_reason_of_its_end():
    async with chat_server() as (client, engine):
        reply = await chat(client, max_tokens=6, seed=3, n=2, logprobs=True, top_logprobs=0)
        prompt, sampling = engine.prompts[0]
        assert reply["id"].startswith("chatcmpl-")
        assert (reply["object"], reply["model"]) == ("chat.completion", "tiny")
        first, second = reply["choices"]
        assert [first["index"], second["index"]] == [0, 1]
        assert {first["finish_reason"], second["finish_reason"]} == {"length"}
        usage = reply["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 12)
        assert usage["total_tokens"] == len(prompt) + 12
        direct = await engine.generate(prompt, replace(sampling, seed=3), session="direct")
        tokens = first["logprobs"]["content"]
        assert [token["logprob"] for token in tokens] == pytest.approx(direct.logprobs.tolist(), abs=1e-4)
        decode = real_tokenizer("qwen3").decode
        assert [token["token"] for token in tokens] == [decode([token]) for token in direct.token_ids]
        assert all(bytes(token["bytes"]).decode() == token["token"] for token in tokens if token["bytes"])
        again = await chat(client, max_tokens=6, seed=4)
        assert again["choices"][0]["message"] == second["message"]
        assert again["choices"][0]["logprobs"] is None


async def test_a_limit_above_the_context_ends_with_it():
    async with chat_server(max_context_len=64) as (client, engine):
        for limit in ({}, {"max_tokens": 5000}, {"max_completion_tokens": 5000}):
            await chat(client, **limit)
            prompt, sampling = engine.prompts[-1]
            assert len(prompt) + sampling.max_new_tokens == 64
        long = [{"role": "user", "content": "Where was Kalor born? " * 20}]
        error = (await chat(client, 400, messages=long))["error"]
        assert error["code"] == "context_length_exceeded"
        assert "the context holds 64" in error["message"]
        endless = [{"role": "user", "content": "a" * 100_000}]
        assert "characters" in (await chat(client, 400, messages=endless))["error"]["message"]


async def test_a_stream_is_the_reply_in_parts():
    async with chat_server() as (client, engine):
        for seed in range(5):
            body = {"seed": seed, "max_tokens": 40 + 25 * seed, "n": 1 + seed % 2}
            whole = await chat(client, **body, logprobs=True)
            chunks = await streamed(client, **body, logprobs=True, stream_options={"include_usage": True})
            last = chunks.pop()
            # The prompt is the same, so its keys and values are there already.
            cached = last["usage"].pop("prompt_tokens_details"), whole["usage"].pop("prompt_tokens_details")
            assert cached[0]["cached_tokens"] == last["usage"]["prompt_tokens"] - 1
            assert (last["choices"], last["usage"]) == ([], whole["usage"])
            assert {chunk["usage"] for chunk in chunks} == {None}
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            for choice in whole["choices"]:
                message, reason = joined(chunks, choice["index"])
                expected = {name: text for name, text in choice["message"].items() if text}
                assert (message, reason) == (expected, choice["finish_reason"])
                parts = [
                    part["logprobs"]["content"]
                    for chunk in chunks
                    for part in chunk["choices"]
                    if part["index"] == choice["index"] and part["logprobs"]
                ]
                sent = [token for part in parts for token in part]
                logprobs = [token.pop("logprob") for token in sent]
                content = choice["logprobs"]["content"]
                # Kernels sum in another order where a part of the prompt is there already.
                assert logprobs == pytest.approx([token.pop("logprob") for token in content], abs=1e-5)
                assert sent == content
        assert engine.num_requests == 0


TURNS = {
    "words": ("So it is 42, as a < b.<|im_end|>", {"content": "So it is 42, as a < b."}, "stop"),
    "a call": (f"I add.\n{CALL}<|im_end|>", {"content": "I add.", "calls": 1}, "tool_calls"),
    "two calls": (f"{CALL}\n{CALL}<|im_end|>", {"content": None, "calls": 2}, "tool_calls"),
    "a thought": (
        "<think>\nHm, [1].\n</think>\n\nYes.<|im_end|>",
        {"content": "Yes.", "thought": "Hm, [1]."},
        "stop",
    ),
    "an unreadable call": ("<tool_call>\n{12}\n</tool_call><|im_end|>", {"holds": "{12}"}, "stop"),
}


@pytest.mark.parametrize("name", TURNS)
async def test_a_turn_is_parsed_into_reasoning_content_and_calls(name):
    text, expected, reason = TURNS[name]
    async with chat_server() as (client, engine):
        scripted(engine, text, matched=ids_of("<|im_end|>")[0])
        (choice,) = (await chat(client, tools=[ADD], tool_choice="auto"))["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == reason
        assert message.get("reasoning_content") == expected.get("thought")
        calls = message.get("tool_calls", [])
        assert [call["function"] for call in calls] == [CALLED["function"]] * expected.get("calls", 0)
        assert len({call["id"] for call in calls}) == len(calls)
        if "holds" in expected:
            assert expected["holds"] in message["content"]
        else:
            assert message["content"] == expected["content"]
        chunks = await streamed(client, tools=[ADD])
        streams, streamed_reason = joined(chunks)
        assert streamed_reason == reason
        assert streams.get("tool_calls", []) == [call["function"] for call in calls]
        assert streams.get("content") == message["content"]
        # What no tool was offered for is no call.
        plain = (await chat(client))["choices"][0]
        assert "tool_calls" not in plain["message"]
        assert plain["finish_reason"] == "stop"


@pytest.mark.parametrize("name", TURNS)
async def test_parts_of_a_turn_never_take_anything_back(name):
    ids, renderer = ids_of(TURNS[name][0]), renderer_of()
    tools = chat_wire._tools([ADD])
    deltas = Deltas(calls_tools=True)
    content = reasoning = ""
    for size in range(1, len(ids) + 1):
        message = await renderer.parse(ids[:size], tools, prompt_ids=())
        calls = tuple(call for call in message.tool_calls if call.arguments is not None)
        text = real_tokenizer("qwen3").decode(ids[:size])
        is_open = text.startswith("<think>") and "</think>" not in text
        turn = ReplyTurn(message.text, message.reasoning or "", calls, is_open)
        if message.tool_calls and size < len(ids):
            turn = turn._replace(calls=message.tool_calls)
        for part in deltas.next(turn, ended=size == len(ids)):
            content += part.get("content", "")
            reasoning += part.get("reasoning_content", "")
    assert (content, reasoning) == (turn.content, turn.reasoning)


async def test_stops_end_the_content_and_are_no_part_of_it():
    async with chat_server() as (client, engine):
        scripted(engine, "one two three", matched=" three")
        (choice,) = (await chat(client, stop=[" three", "four"]))["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one two", "stop")
        sampling = engine.prompts[0][1]
        assert sampling.stop == (" three", "four")
        assert ids_of("<|im_end|>")[0] in sampling.stop_token_ids
        message, _ = joined(await streamed(client, stop=" three"))
        assert message["content"] == "one two"


async def test_what_changes_nothing_is_ignored():
    async with chat_server() as (client, _):
        harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
        neutral = {
            "logit_bias": {},
            "response_format": {"type": "text"},
            "presence_penalty": 0,
            "audio": None,
        }
        plain = await chat(client, max_tokens=4, seed=1)
        reply = await chat(client, max_tokens=4, seed=1, **harmless, **neutral)
        assert reply["choices"] == plain["choices"]


async def test_a_model_without_a_chat_template_says_what_to_do():
    async with embedded_server() as (url, _), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        with pytest.raises(openai.BadRequestError, match="send text to /generate, or serve a folder"):
            await client.chat.completions.create(model="m", messages=ASK)


async def test_a_client_that_leaves_ends_its_requests():
    async with chat_server(max_context_len=1024) as (client, engine):
        body = {"model": "m", "messages": ASK, "n": 2}
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        async with asyncio.timeout(20):
            while engine.num_requests < 2:
                await asyncio.sleep(0.01)
            engine.pause()
            task.cancel()
            while engine.num_requests:
                await asyncio.sleep(0.01)
            engine.resume()
            async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
                await anext(answer.aiter_lines())
            while engine.num_requests:
                await asyncio.sleep(0.01)


async def test_an_aborted_completion_is_to_be_sent_again():
    async with chat_server(max_context_len=1024) as (client, engine):
        engine.pause()
        task = asyncio.create_task(chat(client, 503))
        while not engine.num_requests:
            await asyncio.sleep(0.01)
        await client.post("/abort_request", json={"abort_all": True})
        assert (await task)["error"]["type"] == "server_error"


async def test_openais_own_client_reads_replies_and_streams():
    async with chat_server() as (http, engine):
        client = openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none")
        async with client:
            reply = await client.chat.completions.create(
                model="any", messages=TALK, tools=[ADD], max_tokens=5, seed=1, logprobs=True
            )
            assert reply.usage.completion_tokens == 5
            assert len(reply.choices[0].logprobs.content) == 5
            scripted(engine, f"{CALL}<|im_end|>", matched=ids_of("<|im_end|>")[0])
            reply = await client.chat.completions.create(model="any", messages=ASK, tools=[ADD])
            (call,) = reply.choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12})
            stream = await client.chat.completions.create(model="any", messages=ASK, tools=[ADD], stream=True)
            chunks = [chunk async for chunk in stream]
            (delta,) = [c.choices[0].delta for c in chunks if c.choices[0].delta.tool_calls]
            assert delta.tool_calls[0].function.name == "add"
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await client.chat.completions.create(model="m", messages=ASK, tool_choice="required")
            assert [model.id async for model in await client.models.list()] == ["tiny"]


async def test_our_own_client_plays_an_episode():
    async with chat_server(max_context_len=1024) as (http, engine):
        url, settings = f"{http.base_url}/v1", ChatSettings("any", max_tokens=8)
        async with ChatEndpoint(url=url, attempts=1).connected() as connection:
            await connection.check(settings, ())
            sampled = await play(Parrot(), ChatAgent(connection, settings), SUM)
            assert sampled.usage.completion_tokens == 8 * len(sampled.turns)
            called = iter([f"{CALL}<|im_end|>", "12 it is.<|im_end|>"])

            async def next_turn(prompt_ids, sampling, **more):
                scripted(engine, next(called), matched=ids_of("<|im_end|>")[0])
                generate, engine.generate = engine.generate, next_turn
                return await generate(prompt_ids, sampling, **more)

            engine.generate = next_turn
            played = await play(Parrot(), ChatAgent(connection, settings), SUM)
        assert played.ending is Ending.COMPLETED
        shown = real_tokenizer("qwen3").decode(engine.prompts[-1][0])
        assert "<tool_call>" in shown
        assert "<tool_response>" in shown
