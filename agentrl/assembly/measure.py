"""Prompts as a model's tokenizer writes them: how long they are, and what the model sees."""

from __future__ import annotations

from agentrl.data.report import Measure
from agentrl.envs import Tags
from agentrl.envs.single_turn import schemas_in
from agentrl.rendering.choice import chat_renderer
from agentrl.rendering.inline import InlineRenderer
from agentrl.types import Task
from agentrl.types.seams import Renderer
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
        return renderer.render(task.prompt, schemas_in(task))

    return Measure("tokens", lambda task: len(tokens(task)), lambda task: renderer.decode(tokens(task)))
