"""Which renderer speaks the chat dialect for a tokenizer."""

from __future__ import annotations

import logging

from transformers import PreTrainedTokenizerBase

from agentrl.errors import UserError
from agentrl.protocols import Renderer, ToolSchema
from agentrl.rendering.chat import FamilyRenderer, families, family_of
from agentrl.rendering.template import TemplateRenderer
from agentrl.rendering.template_facts import ChatTemplate
from agentrl.rendering.words import Disarm, as_chat, tools_as_chat
from agentrl.types import Message, Observation, ToolCall

AUTO, TEMPLATE = "auto", "template"

_TOOL = ToolSchema(
    "look", "Look.", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
)
_PROBES: tuple[Observation, ...] = (
    (Message("user", "Where?"),),
    (Message("system", "Be brief."), Message("user", "Where?")),
    (
        Message("user", "Where?"),
        Message("assistant", "", tool_calls=(ToolCall("look", {"at": "it"}, id="call_0"),)),
        Message("tool", "There.", tool_call_id="call_0", name="look"),
    ),
    (Message("user", "Where?"), Message("assistant", "There."), Message("user", "Why?")),
)


def chat_renderer(tokenizer: PreTrainedTokenizerBase, chat_format: str = AUTO) -> Renderer:
    """The renderer of a chat format.

    `auto` takes the format of a published model by its name; else the one format of the library that writes
    some small conversations exactly as the tokenizer's own chat template does; else that template.

    Raises:
        UserError: there is no such format, or it does not fit the tokenizer.
    """
    if chat_format == TEMPLATE:
        return TemplateRenderer(tokenizer)
    if chat_format != AUTO:
        return FamilyRenderer(tokenizer, chat_format)
    named = family_of(str(tokenizer.name_or_path))
    if named is not None:
        return FamilyRenderer(tokenizer, named)
    template = ChatTemplate(tokenizer)
    expected = [_written(tokenizer, template, probe) for probe in _PROBES]
    for family in families() if None not in expected else ():
        renderer = _fitting(tokenizer, family)
        if renderer is not None and [renderer.render(probe, (_TOOL,)) for probe in _PROBES] == expected:
            logging.getLogger(__name__).info("chat format: %s", family)
            return renderer
    logging.getLogger(__name__).info("chat format: the tokenizer's own template")
    return TemplateRenderer(tokenizer)


def _written(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, probe: Observation
) -> list[int] | None:
    """What the tokenizer's own template makes of a conversation; None where it refuses it."""
    chat = [as_chat(message, Disarm(tokenizer)) for message in probe]
    try:
        text = template.text(chat, list(tools_as_chat((_TOOL,))), prompt=True)
    except UserError:
        return None
    return list(tokenizer.encode(text, add_special_tokens=False))


def _fitting(tokenizer: PreTrainedTokenizerBase, family: str) -> FamilyRenderer | None:
    try:
        return FamilyRenderer(tokenizer, family)
    except UserError:
        return None
