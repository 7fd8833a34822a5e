"""The inline dialect as text: parses the text of a model into a Message, and writes Messages as text.

    <search>Kalor Mendos born</search>    a call: one argument as plain text, several as a JSON object
    <answer>Tirak</answer>                the final answer

Rendering uses it over tokens, and the Gymnasium face over strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agentrl.envs.dialect import Tags, closing, opening
from agentrl.tools.json_text import read_json
from agentrl.types import JSON, Message, ToolCall
from agentrl.types.seams import ToolSchema


def read(text: str, tools: Sequence[ToolSchema], tags: Tags) -> Message:
    """The first complete tag of a turn; text before it is reasoning. Never raises.

    A turn without one becomes a ToolCall with an error for the model to read.
    """
    names = tuple(tool.name for tool in tools)
    complete = [match for name in (*names, tags.answer) if (match := _first(text, name))]
    if not complete:
        return Message("assistant", tool_calls=(_malformed(text, (*names, tags.answer)),))
    start, name, inner = min(complete)
    reasoning = text[:start].strip() or None
    if name == tags.answer:
        return Message("assistant", inner.strip(), reasoning=reasoning)
    schema = next(tool for tool in tools if tool.name == name)
    raw = f"{opening(name)}{inner}{closing(name)}"
    return Message("assistant", reasoning=reasoning, tool_calls=(_read_call(schema, inner, raw),))


def _first(text: str, tag: str) -> tuple[int, str, str] | None:
    """The start of the first complete tag of this name, its name, and the text in it."""
    # Two searches: one regular expression would backtrack from every tag that is never closed.
    start = text.find(opening(tag))
    end = text.find(closing(tag), start)
    return None if start < 0 or end < 0 else (start, tag, text[start + len(opening(tag)) : end])


def write(message: Message, tools: Sequence[ToolSchema], tags: Tags) -> str:
    """The text of an action as a policy would write it, closing tag included.

    Raises:
        ValueError: the arguments of a call could not be parsed, so it has no canonical form.
    """
    parts = [message.reasoning or ""]
    schemas = {tool.name: tool for tool in tools}
    for tool_call in message.tool_calls:
        if tool_call.arguments is None:
            raise ValueError(f"cannot write the malformed call {tool_call.raw!r}")
        parts.append(between(tool_call.name, _write_arguments(tool_call, schemas)))
    if not message.tool_calls:
        parts.append(between(tags.answer, message.text))
    return "".join(parts)


def between(tag: str, text: str) -> str:
    """`<tag> text</tag>`."""
    # With the blank, most tokenizers encode the first word as in running text.
    return f"{opening(tag)} {text}{closing(tag)}"


def _malformed(text: str, names: Sequence[str]) -> ToolCall:
    forms = " or ".join(between(name, "...") for name in names)
    return ToolCall("", None, raw=text, error=f"Nothing to do was found in that; write {forms}.")


def _write_arguments(tool_call: ToolCall, schemas: Mapping[str, ToolSchema]) -> str:
    arguments = tool_call.arguments or {}
    if not arguments:
        return ""
    schema = schemas.get(tool_call.name)
    if len(arguments) == 1 and (schema is None or len(_parameters(schema)) == 1):
        (value,) = arguments.values()
        return value if isinstance(value, str) else json.dumps(value)
    return json.dumps(dict(arguments), ensure_ascii=False)


def _parameters(schema: ToolSchema) -> Mapping[str, JSON]:
    properties = schema.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _takes_text(definition: JSON) -> bool:
    if not isinstance(definition, dict):
        return False
    choices = definition.get("anyOf")
    return definition.get("type") == "string" or (
        isinstance(choices, list) and any(map(_takes_text, choices))
    )


def _read_call(schema: ToolSchema, inner: str, raw: str) -> ToolCall:
    parameters = _parameters(schema)
    if len(parameters) == 1 and (inner.strip() or schema.parameters.get("required")):
        ((name, definition),) = parameters.items()
        value = inner.strip() if _takes_text(definition) else _json_or_text(inner)
        return ToolCall(schema.name, {name: value}, raw=raw)
    value = _json_or_text(inner) if inner.strip() else {}
    if isinstance(value, dict):
        return ToolCall(schema.name, value, raw=raw)
    fields = ", ".join(parameters)
    error = f"<{schema.name}> takes a JSON object with {fields or 'no fields'}, not {inner.strip()[:80]!r}."
    return ToolCall(schema.name, None, raw=raw, error=error)


def _json_or_text(text: str) -> JSON:
    try:
        return read_json(text)
    except ValueError:
        return text.strip()
