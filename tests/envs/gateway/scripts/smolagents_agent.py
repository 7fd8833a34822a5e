"""An agent of smolagents, which calls a tool with each turn, and answers by a call, too."""

import os

from playing import open_box as opened
from playing import serve
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def open_box(box: str) -> str:
    """Open a box.

    Args:
        box: The box.
    """
    return opened(box)


def played(question):
    model = OpenAIModel("m", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent(tools=[open_box], model=model, max_steps=5, verbosity_level=0)
    return str(agent.run(question))


serve({"chat": played})
