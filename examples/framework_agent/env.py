"""HopSearch by an agent of the OpenAI Agents SDK: its loop and its tool are its own.

It is trained through the endpoint that each of its episodes has, and knows nothing of that.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from agentrl import Limits, Script, Task
from agentrl.envs.gateway import HarnessEnv
from agentrl.tools import inline
from envs_contrib.hop_search import HopSearch

set_tracing_disabled(True)
WORLD = HopSearch()


@function_tool
def search(query: str) -> str:
    """Find the document that fits some words best."""
    return WORLD.look_up(query)


class FrameworkAgent(HarnessEnv):
    """Questions of one and two hops, answered by an agent that searches by itself."""

    limits = Limits(max_turns=5, max_tokens=224, reset_timeout_s=None, step_timeout_s=None)
    # A model that begins with nothing writes tags; leave it out, and a chat model writes its own format.
    dialect = HopSearch.dialect
    breakdown = HopSearch.breakdown
    tools = tuple(WORLD.tool_schemas)

    async def agent(self, base_url: str, key: str, task: Task) -> str | None:
        """What the agent says in the end."""
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
            searcher = Agent(name="Searcher", tools=[search], model=model)
            result = await Runner.run(searcher, task.prompt[0].text, max_turns=5)
        return str(result.final_output)

    @inline
    def grade(self, task: Task, answer: str, files: Mapping[str, str]) -> float:
        """1.0 for the right name."""
        return WORLD.reward(task, answer)

    def tasks(self, split: str) -> Sequence[Task]:
        """Those of HopSearch."""
        return WORLD.tasks(split)

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """For the warm start of a model that begins with nothing."""
        return WORLD.demonstrator(task, rng)

    def corpus(self) -> Iterable[str]:
        """For its tokenizer."""
        return WORLD.corpus()
