"""Chooses the renderer of the chat dialect for a tokenizer."""

from __future__ import annotations

import logging

from transformers import PreTrainedTokenizerBase

from agentrl.errors import UserError
from agentrl.protocols import Renderer, ToolSchema
from agentrl.rendering.chat import FamilyRenderer, families, family_of
from agentrl.rendering.messages import as_chat, tools_as_chat, verbatim
from agentrl.rendering.template import TemplateRenderer
from agentrl.rendering.template_facts import ChatTemplate
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

    `auto` takes the format of a published model by its name; else the first format of the library that
    renders some small conversations exactly as the tokenizer's own chat template does; else that template.

    Raises:
        UserError: there is no such format, or it does not fit the tokenizer.
    """
    if chat_format == TEMPLATE:
        return TemplateRenderer(tokenizer)
    if chat_format != AUTO:
        return FamilyRenderer(tokenizer, chat_format)
    published = family_of(str(tokenizer.name_or_path))
    if published is not None:
        return FamilyRenderer(tokenizer, published)
    template = ChatTemplate(tokenizer)
    expected = [_template_ids(tokenizer, template, probe) for probe in _PROBES]
    for family in families() if None not in expected else ():
        renderer = _family_renderer(tokenizer, family)
        if renderer is not None and [renderer.render(probe, (_TOOL,)) for probe in _PROBES] == expected:
            logging.getLogger(__name__).info("chat format: %s", family)
            return renderer
    logging.getLogger(__name__).info("chat format: the tokenizer's own template")
    return TemplateRenderer(tokenizer)


def _template_ids(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, probe: Observation
) -> list[int] | None:
    """The tokens of a conversation by the tokenizer's own template; None where it refuses it."""
    chat = [as_chat(message, verbatim) for message in probe]
    try:
        text = template.text(chat, list(tools_as_chat((_TOOL,))), prompt=True)
    except UserError:
        return None
    return list(tokenizer.encode(text, add_special_tokens=False))


def _family_renderer(tokenizer: PreTrainedTokenizerBase, family: str) -> FamilyRenderer | None:
    try:
        return FamilyRenderer(tokenizer, family)
    except UserError:
        return None
