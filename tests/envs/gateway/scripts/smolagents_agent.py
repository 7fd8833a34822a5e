"""An agent of smolagents, which calls a tool with each turn, and answers by a call, too."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other one.
    """
    return a + b


model = OpenAIModel("m", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
print(agent.run("How many are 2 and 3?"))
