"""The SDK of Anthropic: with a loop of its own, whole, as a stream, and without threads."""

import asyncio
import sys

from anthropic import Anthropic, AsyncAnthropic

FIELDS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": FIELDS},
}
ASKED = {"model": "m", "max_tokens": 300, "tools": [ADD], "system": "Be brief."}


def results(message):
    blocks = [block for block in message.content if block.type == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
        for block in blocks
    ]


def said(message):
    return "".join(block.text for block in message.content if block.type == "text")


def whole(messages):
    return Anthropic().messages.create(messages=messages, **ASKED)


def streamed(messages):
    with Anthropic().messages.stream(messages=messages, **ASKED) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == said(message)
    return message


async def without_threads(messages):
    client = AsyncAnthropic()
    counted = await client.messages.count_tokens(
        model="m", messages=messages, tools=[ADD], system="Be brief."
    )
    message = await client.messages.create(messages=messages, **ASKED)
    assert counted.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens
    return message


def main(ask):
    messages = [{"role": "user", "content": "How many are 2 and 3?"}]
    while True:
        message = ask(messages)
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return said(message)
        messages.append({"role": "user", "content": results(message)})


ways = {
    "whole": whole,
    "streamed": streamed,
    "async": lambda messages: asyncio.run(without_threads(messages)),
}
print(main(ways[sys.argv[1]]))
