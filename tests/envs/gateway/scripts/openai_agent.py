"""The SDK of OpenAI: both of its protocols, whole, as a stream, and without threads."""

import asyncio
import json
import sys

from openai import AsyncOpenAI, OpenAI

FIELDS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
FUNCTION = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": FIELDS},
}
ADD = {"type": "function", "function": FUNCTION}
QUESTION = {"role": "user", "content": "How many are 2 and 3?"}


def result(call):
    total = sum(json.loads(call.function.arguments).values())
    return {"role": "tool", "tool_call_id": call.id, "content": str(total)}


def loop(ask):
    messages = [QUESTION]
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.tool_calls:
            return message.content
        messages += [result(call) for call in message.tool_calls]


def whole(messages):
    return OpenAI().chat.completions.create(model="m", messages=messages, tools=[ADD]).choices[0].message


def streamed(messages):
    with OpenAI().chat.completions.stream(model="m", messages=messages, tools=[ADD]) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


async def without_threads(messages):
    client = AsyncOpenAI()
    reply = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
    return reply.choices[0].message


def responses(stream):
    items, tools = [QUESTION], [{"type": "function", "strict": True, **FUNCTION}]
    while True:
        if stream:
            with OpenAI().responses.stream(model="m", input=items, tools=tools) as events:
                text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
                response = events.get_final_response()
            assert text == response.output_text
        else:
            response = OpenAI().responses.create(model="m", input=items, tools=tools)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        items += [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output
        ]
        for call in calls:
            total = str(sum(json.loads(call.arguments).values()))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": total})


ways = {
    "whole": lambda: loop(whole),
    "streamed": lambda: loop(streamed),
    "async": lambda: loop(lambda messages: asyncio.run(without_threads(messages))),
    "responses": lambda: responses(stream=False),
    "responses streamed": lambda: responses(stream=True),
}
print(ways[sys.argv[1]]())
