"""An agent of the OpenAI Agents SDK as one may have it already, with its own loop and its own tool."""

from __future__ import annotations

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from envs_contrib.hop_search import HopSearch

set_tracing_disabled(True)
WORLD = HopSearch()


@function_tool
def search(query: str) -> str:
    """Find the document that fits some words best."""
    return WORLD.look_up(query)


async def answer(question: str, base_url: str, key: str) -> str:
    """What the agent says in the end."""
    # The endpoint is on this machine, without TLS: certificates would be loaded in 50 ms for nothing.
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=http) as client:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        searcher = Agent(name="Searcher", tools=[search], model=model)
        result = await Runner.run(searcher, question, max_turns=5)
    return str(result.final_output)
