"""The SDK of Anthropic with a loop of its own: whole and as a stream, sync and async."""

import asyncio

from anthropic import Anthropic, AsyncAnthropic
from playing import (
    DESCRIPTION,
    NAME,
    SCHEMA,
    SYSTEM,
    answered,
    answered_without_threads,
    open_box,
    serve,
)

TOOL = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}
COUNTED = {"model": "m", "tools": [TOOL], "system": SYSTEM}
ASKED = {**COUNTED, "max_tokens": 300}
STEPS = 6


def results(message):
    blocks = [block for block in message.content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": open_box(block.input.get("box"))}
        for block in blocks
    ]


def said(message):
    return "".join(block.text for block in message.content if block.type == "text")


def conversation(question):
    messages = [{"role": "user", "content": question}]
    for _ in range(STEPS):
        message = yield messages
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return said(message)
        messages.append({"role": "user", "content": results(message)})
    return None


def whole(question):
    with Anthropic() as client:
        create = client.messages.create
        return answered(conversation(question), lambda messages: create(messages=messages, **ASKED))


def streamed(question):
    with Anthropic() as client:

        def ask(messages):
            with client.messages.stream(messages=messages, **ASKED) as stream:
                text = "".join(stream.text_stream)
                message = stream.get_final_message()
            assert text == said(message)
            return message

        return answered(conversation(question), ask)


async def without_threads(question):
    async with AsyncAnthropic() as client:

        async def ask(messages):
            message = await client.messages.create(messages=messages, **ASKED)
            # What goes on from sampled tokens may have others than a prompt that is rendered as a whole.
            if len(messages) == 1:
                counted, usage = (
                    await client.messages.count_tokens(messages=messages, **COUNTED),
                    message.usage,
                )
                assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
            return message

        return await answered_without_threads(conversation(question), ask)


async def streamed_without_threads(question):
    async with AsyncAnthropic() as client:

        async def ask(messages):
            async with client.messages.stream(messages=messages, **ASKED) as stream:
                text = "".join([part async for part in stream.text_stream])
                message = await stream.get_final_message()
            assert text == said(message)
            return message

        return await answered_without_threads(conversation(question), ask)


serve(
    {
        "whole": whole,
        "streamed": streamed,
        "async": lambda question: asyncio.run(without_threads(question)),
        "async streamed": lambda question: asyncio.run(streamed_without_threads(question)),
    }
)
