"""OpenAI's agents: chat and responses, whole and as a stream."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(way):
    kind = OpenAIResponsesModel if "responses" in way else OpenAIChatCompletionsModel
    model = kind(model="m", openai_client=AsyncOpenAI())
    agent = Agent(name="Adder", instructions="Be brief.", tools=[add], model=model)
    if "streamed" not in way:
        return (await Runner.run(agent, "How many are 2 and 3?")).final_output
    run = Runner.run_streamed(agent, "How many are 2 and 3?")
    async for _ in run.stream_events():
        pass
    return run.final_output


print(asyncio.run(main(sys.argv[1])))
