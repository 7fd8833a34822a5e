"""An agent of Pydantic AI, over the protocols of OpenAI and of Anthropic."""

from playing import SYSTEM, serve
from playing import open_box as opened
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


def played(kind, question):
    agent = Agent(kind("m"), instructions=SYSTEM, retries=3)

    @agent.tool_plain
    def open_box(box: str, times: int = 1) -> str:
        """Open a box."""
        return opened(box)

    return agent.run_sync(question).output


serve(
    {
        "chat": lambda question: played(OpenAIChatModel, question),
        "responses": lambda question: played(OpenAIResponsesModel, question),
        "anthropic": lambda question: played(AnthropicModel, question),
    }
)
