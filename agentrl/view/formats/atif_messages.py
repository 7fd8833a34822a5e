"""Messages as steps of ATIF, and back: the fields that both have, and `extra` for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from agentrl.types import JSON, Image, Message, Part, Text, ToolCall
from agentrl.view.formats.provenance import message_json

OWN: Final = "agentrl"
"""The key of our own facts in every `extra`."""


def content_of(message: Message) -> JSON:
    """The content of a message: text, or a list of parts; an image is a data URL."""
    if isinstance(message.content, str):
        return message.content
    return [_part(part) for part in message.content]


def _part(part: Part) -> JSON:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    return {"type": "image", "source": {"media_type": part.media_type, "path": part.url}}


def action_of(message: Message) -> dict[str, JSON]:
    """A message of the assistant as an agent step without its number."""
    step: dict[str, JSON] = {"source": "agent", "message": content_of(message)}
    if message.reasoning is not None:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [_call(call, place) for place, call in enumerate(message.tool_calls)]
    plain = Message("assistant", message.content, message.reasoning, message.tool_calls)
    if message != plain:
        step["extra"] = {OWN: {"message": message_json(message)}}
    return step


def _call(call: ToolCall, place: int) -> JSON:
    """A call. ATIF needs an id, and an object of arguments, which a malformed call has not."""
    own: dict[str, JSON] = {"raw": call.raw} if call.raw else {}
    if not call.id:
        own["id"] = ""
    if call.error is not None:
        own["error"] = call.error
    arguments: JSON = dict(call.arguments or {})
    found: dict[str, JSON] = {
        "tool_call_id": call.id or f"call_{place}",
        "function_name": call.name,
        "arguments": arguments,
    }
    return {**found, "extra": {OWN: own}} if own else found


def result_of(message: Message, step: Mapping[str, JSON], place: int) -> dict[str, JSON]:
    """A result of a tool, in the observation of the agent step that called it.

    place: among the results of that step: one without an id answers the call at its place.
    """
    calls = step.get("tool_calls")
    ids = (
        [call["tool_call_id"] for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    )
    found: dict[str, JSON] = {"content": content_of(message)}
    if message.tool_call_id in ids:
        found["source_call_id"] = message.tool_call_id
    elif not message.tool_call_id and place < len(ids):
        found["source_call_id"] = ids[place]
    is_whole = message == Message(
        "tool", message.content, tool_call_id=message.tool_call_id, name=message.name
    )
    own: dict[str, JSON] = {} if is_whole else {"message": message_json(message)}
    if message.tool_call_id != found.get("source_call_id"):
        own["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        own["name"] = message.name
    return {**found, "extra": {OWN: own}} if own else found


def read_content(content: str | Sequence[Mapping[str, JSON]] | None) -> str | tuple[Part, ...]:
    """The inverse of `content_of`. What lies in another file, or is sound, becomes a text that names it."""
    if content is None or isinstance(content, str):
        return content or ""
    return tuple(map(_read_part, content))


def _read_part(part: Mapping[str, JSON]) -> Part:
    source, text = part.get("source"), part.get("text")
    if isinstance(text, str):
        return Text(text)
    path = source.get("path") if isinstance(source, dict) else None
    if isinstance(path, str) and path.startswith("data:image/"):
        return Image(path)
    return Text(f"[{part.get('type')}: {str(path)[:200]}]")
