"""Conversion of a row's JSON to messages and tools, in the format of chat endpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast, get_args

from agentrl.types import JSON, Image, Message, Observation, Part, Role, Text, ToolCall
from agentrl.types.seams import ToolSchema

_ROLES = get_args(Role)


def prompt_of(value: JSON) -> Observation:
    """The messages of a prompt. A string is one message of the user; a list holds messages, and the
    model answers the last of them.

    Raises:
        ValueError: the value is neither, or a message is invalid; the text describes the fault.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("is empty")
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"is {json.dumps(value)[:60]}, not a string or a list of messages")
    messages = messages_of(value)
    if messages[-1].role == "assistant":
        raise ValueError(
            "ends with a message of the assistant, which is what the model shall write; leave it out"
        )
    return messages


def messages_of(items: Sequence[JSON]) -> Observation:
    """The messages of a list.

    Raises:
        ValueError: the list is empty, or a message is invalid; the text describes the fault.
    """
    messages = tuple(_message(item, number) for number, item in enumerate(items, start=1))
    if not messages:
        raise ValueError("is an empty list of messages")
    try:
        for message in messages:
            message.text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no text") from None
    return messages


def _message(item: JSON, number: int) -> Message:
    if not isinstance(item, dict):
        raise ValueError(
            f'has a message {number} that is no object such as {{"role": "user", "content": "..."}}'
        )
    role = item.get("role")
    if role not in _ROLES:
        raise ValueError(f"has a message {number} of the role {role!r}; roles are {', '.join(_ROLES)}")
    texts = {name: item.get(name) for name in ("reasoning", "reasoning_content", "tool_call_id", "name")}
    for name, value in texts.items():
        if not isinstance(value, str | None):
            raise ValueError(f"has a message {number} whose `{name}` is no string")
    fields = cast("Mapping[str, str | None]", texts)
    calls = item.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise ValueError(f"has a message {number} whose `tool_calls` is no list of calls of the assistant")
    return Message(
        cast("Role", role),
        _content(item.get("content"), number),
        fields["reasoning"] or fields["reasoning_content"],
        tuple(_call(call, number) for call in calls),
        fields["tool_call_id"],
        fields["name"],
    )


def _content(content: JSON, number: int) -> str | tuple[Part, ...]:
    if content is None:
        return ""
    if isinstance(content, list):
        return tuple(_part(part, number) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"has a message {number} whose content is neither a string nor a list of parts")
    return content


def _part(item: JSON, number: int) -> Part:
    part = item if isinstance(item, dict) else {}
    text, image = part.get("text"), part.get("image_url")
    if isinstance(text, str):
        return Text(text)
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise ValueError(f"has a message {number} with a part that is neither text nor an image_url")
    try:
        return Image(url)
    except ValueError as error:
        raise ValueError(f"has a message {number} with an image that cannot be used: {error}") from None


def _call(item: JSON, number: int) -> ToolCall:
    call = item if isinstance(item, dict) else {}
    function = call.get("function")
    function = function if isinstance(function, dict) else call
    name, arguments, id = function.get("name"), function.get("arguments"), call.get("id")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise ValueError(
                f"has a message {number} with a tool call whose arguments are not JSON: {arguments[:60]!r}"
            ) from None
    if not isinstance(name, str) or not isinstance(arguments, dict) or not isinstance(id, str | None):
        raise ValueError(
            f"has a message {number} with a tool call that lacks a name or an object of arguments"
        )
    return ToolCall(name, arguments, json.dumps(arguments), id or "")


def tools_of(value: JSON) -> Sequence[JSON]:
    """The schemas of tools, each as {"name", "description", "parameters"}.

    Raises:
        ValueError: a tool has no name or no parameters; the text has its number.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("is a string that is no JSON") from None
    if not isinstance(value, list):
        raise ValueError("is no list of tools")
    return [_tool(item, number) for number, item in enumerate(value, start=1)]


def schema_of(tool: JSON) -> ToolSchema:
    """One of what `tools_of` returns."""
    assert isinstance(tool, dict), "tools_of gives objects"
    parameters = tool["parameters"]
    assert isinstance(parameters, dict), "tools_of checks them"
    return ToolSchema(str(tool["name"]), str(tool["description"]), parameters)


def _tool(item: JSON, number: int) -> JSON:
    outer = item if isinstance(item, dict) else {}
    function = outer.get("function")
    tool = function if isinstance(function, dict) else outer
    name, parameters = tool.get("name"), tool.get("parameters")
    if isinstance(parameters, str):
        try:
            parameters = json.loads(parameters)
        except ValueError:
            parameters = None
    if not isinstance(name, str) or not name or not isinstance(parameters, dict):
        raise ValueError(f"has a tool {number} without a name, or without an object of parameters")
    return {"name": name, "description": str(tool.get("description") or ""), "parameters": parameters}
