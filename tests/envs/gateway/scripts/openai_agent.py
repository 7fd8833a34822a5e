"""The SDK of OpenAI: both of its protocols, whole and as streams, sync and async; branches and compaction."""

import asyncio

from openai import AsyncOpenAI, OpenAI
from playing import (
    DESCRIPTION,
    NAME,
    SCHEMA,
    SYSTEM,
    answered,
    answered_without_threads,
    result_of,
    serve,
)

FUNCTION = {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
ASKED = {"model": "m", "tools": [{"type": "function", "function": FUNCTION}]}
RESPONDED = {"model": "m", "tools": [{"type": "function", "strict": True, **FUNCTION}]}
STEPS = 6


def begun(question):
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def results(message):
    return [
        {"role": "tool", "tool_call_id": call.id, "content": result_of(call.function.arguments)}
        for call in message.tool_calls
    ]


def chat(question, kept=lambda messages: messages):
    """A conversation: its requests are messages, and their replies one message each."""
    messages = begun(question)
    for _ in range(STEPS):
        message = yield messages
        if not message.tool_calls:
            return message.content
        messages = kept([*messages, message, *results(message)])
    return None


def compacted(messages):
    """A conversation that is long becomes the question and what was found."""
    if len(messages) <= 5:
        return messages
    found = messages[-1]["content"]
    return [*messages[:2], {"role": "user", "content": f"So far: {found}"}]


def without_results(messages):
    """Only the newest results are kept."""
    last = max(place for place, message in enumerate(messages) if not isinstance(message, dict))
    return [
        {**message, "content": "(dropped)"} if place < last and is_result(message) else message
        for place, message in enumerate(messages)
    ]


def is_result(message):
    return isinstance(message, dict) and message["role"] == "tool"


def whole(conversation):
    with OpenAI() as client:
        create = client.chat.completions.create
        return answered(conversation, lambda messages: create(messages=messages, **ASKED).choices[0].message)


def streamed(conversation):
    with OpenAI() as client:

        def ask(messages):
            with client.chat.completions.stream(messages=messages, **ASKED) as stream:
                text = "".join(event.delta for event in stream if event.type == "content.delta")
                message = stream.get_final_completion().choices[0].message
            assert text == (message.content or "")
            return message

        return answered(conversation, ask)


async def without_threads(conversation):
    async with AsyncOpenAI() as client:

        async def ask(messages):
            return (await client.chat.completions.create(messages=messages, **ASKED)).choices[0].message

        return await answered_without_threads(conversation, ask)


async def streamed_without_threads(conversation):
    async with AsyncOpenAI() as client:

        async def ask(messages):
            async with client.chat.completions.stream(messages=messages, **ASKED) as stream:
                text = "".join([event.delta async for event in stream if event.type == "content.delta"])
                message = (await stream.get_final_completion()).choices[0].message
            assert text == (message.content or "")
            return message

        return await answered_without_threads(conversation, ask)


async def beside_each_other(question):
    """Two requests at once, one with two replies, of which the conversation goes on from one."""
    hint = {"role": "user", "content": "Begin with the first one."}
    async with AsyncOpenAI() as client:
        create = client.chat.completions.create

        async def ask(messages):
            one, _ = await asyncio.gather(
                create(messages=messages, n=2, **ASKED), create(messages=[*messages, hint], **ASKED)
            )
            return one.choices[-1].message

        return await answered_without_threads(chat(question), ask)


def response(question, *, remembers=False):
    """A conversation: its requests are items, and their replies responses.

    remembers: a request has new items alone, after the response that it names.
    """
    items, before = begun(question), None
    for _ in range(STEPS):
        reply = yield {"input": items, **({"previous_response_id": before} if before else {})}
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        said = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
        found = [
            {"type": "function_call_output", "call_id": call.call_id, "output": result_of(call.arguments)}
            for call in calls
        ]
        items, before = (found, reply.id) if remembers else ([*items, *said, *found], None)
    return None


def responses(conversation):
    with OpenAI() as client:
        return answered(conversation, lambda asked: client.responses.create(**asked, **RESPONDED))


def responses_streamed(conversation):
    with OpenAI() as client:

        def ask(asked):
            with client.responses.stream(**asked, **RESPONDED) as events:
                text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
                reply = events.get_final_response()
            assert text == reply.output_text
            return reply

        return answered(conversation, ask)


async def responses_streamed_without_threads(conversation):
    async with AsyncOpenAI() as client:

        async def ask(asked):
            async with client.responses.stream(**asked, **RESPONDED) as events:
                deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
                reply = await events.get_final_response()
            assert "".join(deltas) == reply.output_text
            return reply

        return await answered_without_threads(conversation, ask)


serve(
    {
        "whole": lambda question: whole(chat(question)),
        "streamed": lambda question: streamed(chat(question)),
        "async": lambda question: asyncio.run(without_threads(chat(question))),
        "async streamed": lambda question: asyncio.run(streamed_without_threads(chat(question))),
        "compacted": lambda question: whole(chat(question, compacted)),
        "results dropped": lambda question: whole(chat(question, without_results)),
        "beside each other": lambda question: asyncio.run(beside_each_other(question)),
        "responses": lambda question: responses(response(question)),
        "responses streamed": lambda question: responses_streamed(response(question)),
        "responses async streamed": lambda question: asyncio.run(
            responses_streamed_without_threads(response(question))
        ),
        "responses remembered": lambda question: responses(response(question, remembers=True)),
    }
)
