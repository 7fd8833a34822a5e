"""An agent of Pydantic AI, over the protocols of OpenAI and of Anthropic."""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

models = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "anthropic": AnthropicModel}
agent = Agent(models[sys.argv[1]]("m"), instructions="Be brief.")


@agent.tool_plain
def add(a: int, b: int = 3) -> int:
    """Add two numbers."""
    return a + b


print(agent.run_sync("How many are 2 and 3?").output)
