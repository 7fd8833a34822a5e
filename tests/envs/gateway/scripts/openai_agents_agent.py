"""OpenAI's agents: chat and responses, whole and as streams; one hands off, and one asks another."""

import asyncio

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from playing import SYSTEM, serve
from playing import open_box as opened

set_tracing_disabled(True)


@function_tool
def open_box(box: str) -> str:
    """Open a box."""
    return opened(box)


def opener(model):
    return Agent(name="Opener", instructions=SYSTEM, tools=[open_box], model=model)


def hands_off(model):
    return Agent(name="Desk", instructions="Hand off.", handoffs=[opener(model)], model=model)


def asks_another(model):
    helper = opener(model).as_tool(tool_name="ask_opener", tool_description="Ask who opens boxes.")
    return Agent(name="Desk", instructions="Ask.", tools=[helper], model=model)


async def whole(agent, question):
    return (await Runner.run(agent, question, max_turns=6)).final_output


async def streamed(agent, question):
    run = Runner.run_streamed(agent, question, max_turns=6)
    async for _ in run.stream_events():
        pass
    return run.final_output


def way(run, agent, kind=OpenAIChatCompletionsModel):
    async def play(question):
        async with AsyncOpenAI() as client:
            return await run(agent(kind(model="m", openai_client=client)), question)

    return lambda question: asyncio.run(play(question))


serve(
    {
        "chat": way(whole, opener),
        "chat streamed": way(streamed, opener),
        "responses": way(whole, opener, OpenAIResponsesModel),
        "responses streamed": way(streamed, opener, OpenAIResponsesModel),
        "handoff": way(whole, hands_off),
        "sub-agent": way(whole, asks_another),
    }
)
