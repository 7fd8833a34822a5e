"""Prompts as a model's tokenizer writes them: how long they are, and what the model sees."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.data.columns import TOOLS
from agentrl.data.report import Measure
from agentrl.envs import Tags
from agentrl.rendering.choice import chat_renderer
from agentrl.rendering.inline import InlineRenderer
from agentrl.types import JSON, Task
from agentrl.types.seams import Renderer, ToolSchema
from agentrl.weights.hf.source import open_tokenizer


def tokenizer_measure(directory: str, dialect: str) -> Measure:
    """Prompts in the tokens of a model directory. dialect: chat or inline.

    Raises:
        ModelLoadError: it holds no tokenizer.
        UserError: the tokenizer has no chat format.
    """
    tokenizer = open_tokenizer(directory)
    renderer: Renderer = (
        InlineRenderer(tokenizer, Tags()) if dialect == "inline" else chat_renderer(tokenizer)
    )

    def tokens(task: Task) -> list[int]:
        tools = task.metadata.get(TOOLS)
        described = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        return renderer.render(task.prompt, [_schema(tool) for tool in described])

    return Measure("tokens", lambda task: len(tokens(task)), lambda task: renderer.decode(tokens(task)))


def _schema(tool: Mapping[str, JSON]) -> ToolSchema:
    parameters = tool.get("parameters")
    described = parameters if isinstance(parameters, dict) else {}
    return ToolSchema(str(tool.get("name")), str(tool.get("description")), described)
