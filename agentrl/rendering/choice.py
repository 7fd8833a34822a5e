"""Chooses the renderer of the chat dialect for a tokenizer: its own chat template is asked, not its name."""

from __future__ import annotations

import logging
import re

from transformers import PreTrainedTokenizerBase

from agentrl.errors import RenderingError, UserError
from agentrl.rendering.bounded import TokenRenderer
from agentrl.rendering.chat import FamilyRenderer, families, family_of
from agentrl.rendering.messages import as_chat, tools_as_chat, verbatim
from agentrl.rendering.template import TemplateRenderer
from agentrl.rendering.template_facts import ChatTemplate
from agentrl.types import JSON, Message, Observation, ToolCall
from agentrl.types.seams import ToolSchema

AUTO, TEMPLATE = "auto", "template"

_FIELDS: JSON = {"at": {"type": "string"}, "far": {"type": "boolean"}, "how": {"type": "object"}}
_TOOLS = (
    ToolSchema("look", "Look.", {"type": "object", "properties": _FIELDS, "required": ["at"]}),
    ToolSchema("wait", "Wait.", {"type": "object", "properties": {}}),
)
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


def _turn(content: str, *calls: ToolCall, thought: str | None = None) -> Observation:
    """A turn, and the results of its calls."""
    results = (Message("tool", "There.", tool_call_id=call.id, name=call.name) for call in calls)
    return (Message("assistant", content, thought, calls), *results)


_ASK = (Message("user", "Where?"),)
_LOOK = ToolCall("look", {"at": "it", "far": True, "how": {"fast": [1, 2]}}, id="call_0")
_WAIT = ToolCall("wait", {}, id="call_1")
_THOUGHT = (*_ASK, *_turn("", _LOOK, thought="Hm."))
_PROBES: tuple[Observation, ...] = (
    _ASK,
    (Message("system", "Be brief."), *_ASK),
    (*_ASK, *_turn("", _LOOK)),
    (*_ASK, *_turn("So.", _LOOK), *_turn("", _WAIT), *_turn("There."), *_ASK),
    (*_ASK, *_turn("", _LOOK, _WAIT)),
    (*_ASK, *_turn("There."), *_ASK),
    _THOUGHT,
    (*_THOUGHT, *_turn("So.", _WAIT, thought="Hm, hm."), *_turn("There.", thought="Oh."), *_ASK),
    (*_ASK, *_turn("There.", thought="Oh."), *_ASK, *_turn("", _LOOK, thought="Hm.")),
)


def chat_renderer(tokenizer: PreTrainedTokenizerBase, chat_format: str = AUTO) -> TokenRenderer:
    """The renderer of a chat format.

    `auto` takes the first format of the library that renders some small conversations exactly as the
    tokenizer's own chat template does, but for empty thoughts in earlier turns; else that template. The
    format of the tokenizer's name is tried first; it decides only where there is no template.

    Raises:
        UserError: there is no such format, or it does not fit the tokenizer.
    """
    if chat_format == TEMPLATE:
        return TemplateRenderer(tokenizer)
    if chat_format != AUTO:
        return FamilyRenderer(tokenizer, chat_format)
    published = family_of(str(tokenizer.name_or_path))
    if published is not None and tokenizer.chat_template is None:
        return FamilyRenderer(tokenizer, published)
    template = ChatTemplate(tokenizer)
    for family in sorted(families(), key=lambda name: name != published):
        renderer = _family_renderer(tokenizer, family)
        if renderer is not None and all(
            _agrees(renderer, tokenizer, template, probe, tools)
            for probe in _PROBES
            for tools in (_TOOLS, ())
        ):
            logging.getLogger(__name__).info("chat format: %s", family)
            return renderer
    logging.getLogger(__name__).info("chat format: the tokenizer's own template")
    return TemplateRenderer(tokenizer)


def _agrees(
    renderer: FamilyRenderer,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    probe: Observation,
    tools: tuple[ToolSchema, ...],
) -> bool:
    """Whether both render a conversation alike, or both refuse it."""
    chat = [as_chat(message, verbatim) for message in probe]
    try:
        text = template.text(chat, list(tools_as_chat(tools)), prompt=True)
        expected = list(tokenizer.encode(text, add_special_tokens=False))
    except UserError:
        expected = None
    try:
        rendered = renderer.render(probe, tools)
    except (UserError, RenderingError):
        rendered = None
    if expected is None or rendered is None or expected == rendered:
        return expected == rendered
    # Formats of models that begin with an empty thought keep it in earlier turns, so that the prefix holds.
    has_history = any(message.role == "assistant" for message in probe)
    texts = [_EMPTY_THOUGHT.sub("", renderer.decode(ids)) for ids in (expected, rendered)]
    return has_history and texts[0] == texts[1]


def _family_renderer(tokenizer: PreTrainedTokenizerBase, family: str) -> FamilyRenderer | None:
    try:
        return FamilyRenderer(tokenizer, family)
    except UserError:
        return None
