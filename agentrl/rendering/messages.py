"""Messages in the form of chat templates, with escaped markup.

Only what the engine sampled may be a special token. Everything that is rendered from text has its markup
escaped: prompts, results and descriptions of tools, and the model's own text where it is rendered again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from agentrl.errors import UserError
from agentrl.tools.json_text import encodable, storable
from agentrl.types import JSON, Message, ToolCall
from agentrl.types.seams import ToolSchema

Escape = Callable[[str], str]

_WORD_JOINER = "\u2060"


class MarkupEscaper:
    """Escapes the special tokens of a tokenizer, and the strings of `more`, except those of `keep`.

    Tokenizers encode `<|im_end|>` in a document as the end of a turn: the author of a web page could write
    as the user. An invisible word joiner behind the first character keeps the text and breaks the token.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, more: Iterable[str] = (), keep: Iterable[str] = ()
    ) -> None:
        special = (*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens)
        # Some tokenizers have tokens for runs of blanks and line ends, which are no markup.
        tokens = {token for token in (*special, *more) if len(token) > 1 and token.strip()} - {*keep}
        rests: defaultdict[str, list[str]] = defaultdict(list)
        for token in sorted(tokens):
            rests[token[0]].append(re.escape(token[1:]))
        # Only the first letter is consumed, since tokens may overlap. There are few of these, and a search
        # finds the next one many times as fast as it tries tokens.
        any_of = [f"{re.escape(letter)}(?={'|'.join(rest)})" for letter, rest in rests.items()]
        self._markup = re.compile("|".join(any_of)) if tokens else None

    def __call__(self, text: str) -> str:
        """The text with escaped markup; unchanged where it holds none."""
        if self._markup is None:
            return text
        starts = [match.start() for match in self._markup.finditer(text)]
        parts = [text[a:b] for a, b in pairwise([0, *(start + 1 for start in starts), len(text)])]
        return _WORD_JOINER.join(parts)


def plain_text(message: Message) -> str:
    """The text of a message, for renderers that have no form for images.

    Raises:
        UserError: the message holds an image.
    """
    if message.images:
        raise UserError(
            f"this model's renderer has no form for the image in a message of role {message.role}; show "
            "words instead, or evaluate a model that sees images at a chat endpoint (openai_url)."
        )
    return message.text


def verbatim(text: str) -> str:
    """The same text: for an action that is written as the engine would sample it."""
    return text


def escaped(message: Message, escape: Escape) -> Message:
    """The message with escaped markup in all of its text.

    Raises:
        UserError: the message holds an image.
    """
    calls = tuple(
        replace(
            call,
            name=escape(call.name),
            arguments=None if call.arguments is None else _escaped_fields(call.arguments, escape),
            raw=escape(call.raw),
            id=escape(call.id),
        )
        for call in message.tool_calls
    )
    # The ids and names in results may be text of the model, which made the call.
    reasoning, call_id, name = (
        None if text is None else escape(text)
        for text in (message.reasoning, message.tool_call_id, message.name)
    )
    return Message(message.role, escape(plain_text(message)), reasoning, calls, call_id, name)


def escaped_tool(tool: ToolSchema, escape: Escape) -> ToolSchema:
    """The tool with escaped markup in its name, its description and its parameters."""
    return ToolSchema(escape(tool.name), escape(tool.description), _escaped_fields(tool.parameters, escape))


def _escaped_fields(fields: Mapping[str, JSON], escape: Escape) -> dict[str, JSON]:
    return {escape(key): _escaped_value(value, escape) for key, value in fields.items()}


def _escaped_value(value: JSON, escape: Escape) -> JSON:
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, list):
        return [_escaped_value(member, escape) for member in value]
    return _escaped_fields(value, escape) if isinstance(value, dict) else value


def as_chat(message: Message, escape: Escape) -> dict[str, JSON]:
    """The dict that chat templates take for a message, with escaped markup.

    A call with unreadable arguments is part of the content, as the model wrote it.

    Raises:
        UserError: the message holds an image.
    """
    message = escaped(message, escape)
    readable = [call for call in message.tool_calls if call.arguments is not None]
    unreadable = [call.raw for call in message.tool_calls if call.arguments is None]
    content = "\n".join(filter(None, [message.text, *unreadable]))
    chat: dict[str, JSON] = {"role": message.role, "content": content}
    if readable:
        chat["tool_calls"] = [_call_as_chat(call, index) for index, call in enumerate(readable)]
    if message.reasoning is not None:
        chat["reasoning_content"] = message.reasoning
    if message.role == "tool":
        chat |= {"tool_call_id": message.tool_call_id or "", "name": message.name or ""}
    return chat


def _call_as_chat(tool_call: ToolCall, index: int) -> JSON:
    function: JSON = {"name": tool_call.name, "arguments": dict(tool_call.arguments or {})}
    return {"type": "function", "id": tool_call.id or f"call_{index}", "function": function}


def read_call(name: JSON, arguments: JSON, raw: str, index: int) -> ToolCall:
    """A ToolCall from the name and arguments that a model wrote, with an error where they are invalid."""
    id = f"call_{index}"
    if not isinstance(name, str) or not name:
        return ToolCall("", None, raw=raw, id=id, error="The call names no tool; write its name as a string.")
    name = encodable(name)
    try:
        valid = storable(arguments)
    except ValueError:
        valid = None
    if not isinstance(valid, dict):
        error = f"{name}: the arguments must be a JSON object of what the tool takes, not {_clip(raw)}."
        return ToolCall(name, None, raw=raw, id=id, error=error)
    return ToolCall(name, valid, raw=raw, id=id)


def unreadable_call(reason: str, raw: str, index: int) -> ToolCall:
    """A ToolCall for text that could not be parsed, with an error message for the model."""
    return ToolCall("", None, raw=raw, id=f"call_{index}", error=f"{reason}: {_clip(raw)}")


def tools_as_chat(tools: Sequence[ToolSchema]) -> list[dict[str, JSON]]:
    """Tool schemas in the form of OpenAI's API, which most templates take."""
    return [{"type": "function", "function": tool_as_json(tool)} for tool in tools]


def tool_as_json(tool: ToolSchema) -> dict[str, JSON]:
    """Name, description and parameters of a tool."""
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}


def _clip(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "...")
