"""The JSON of `/chat/completions`, as far as an agent needs it: replies read, errors told apart.

    {"choices": [{"finish_reason": "tool_calls", "message": {"role": "assistant", "content": null,
       "tool_calls": [{"id": "c1", "type": "function",
                       "function": {"name": "search", "arguments": "{\\"query\\": \\"Kalor\\"}"}}]}}],
     "usage": {"prompt_tokens": 31, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 16}}}

Whatever a model may have written is read: arguments that are no JSON, calls without a name or an id, nothing
at all. Only what the endpoint itself owes (a choice with a message) is demanded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from agentrl.tools.json_text import is_storable, read_json
from agentrl.types import JSON, Finish, Message, ToolCall, Usage

Body = dict[str, JSON]
REASONING_FIELDS = ("reasoning_content", "reasoning")
_FINISHES = {"length": Finish.LENGTH, "content_filter": Finish.LENGTH}
_BROKEN_OFF = ("abort", "error")
_NO_ROOM = re.compile(r"context[ _](?:length|window)", re.IGNORECASE)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_SHOWN_CHARACTERS = 200


class ChatReply(NamedTuple):
    """A turn. said: the same as a message of the next request. usage: None = the endpoint did not say.

    reason: `finish_reason` as it came. refused: what there is of content is the model's refusal.
    """

    message: Message
    said: Body
    finish: Finish
    reason: str
    refused: bool
    usage: Usage | None


def read_reply(body: bytes) -> ChatReply:
    """The turn of a reply.

    Raises:
        ValueError: it is no reply; the text says why.
    """
    try:
        found: JSON = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the reply is no JSON") from None
    whole = _table(found)
    if whole.get("error"):
        raise ValueError(f"the reply is an error: {error_text(body)}")
    choices = whole.get("choices")
    choice = _table(choices[0]) if isinstance(choices, list) and choices else {}
    if not isinstance(choice.get("message"), dict):
        raise ValueError("the reply holds no message")
    reason = _text(choice.get("finish_reason"))
    if reason in _BROKEN_OFF:
        raise ValueError(f"the endpoint ended the turn itself ({reason})")
    written = _table(choice["message"])
    calls = _unique(_read_call(one) for one in _items(written.get("tool_calls")))
    refused = not written.get("content") and bool(written.get("refusal"))
    content = _content(written.get("refusal" if refused else "content"))
    thoughts = {name: _text(written[name]) for name in REASONING_FIELDS if isinstance(written.get(name), str)}
    return ChatReply(
        Message("assistant", content, next(filter(None, thoughts.values()), None), calls),
        {**assistant_body(content, calls), **thoughts},
        _FINISHES.get(reason, Finish.STOP),
        reason,
        refused,
        _usage(whole.get("usage")),
    )


def assistant_body(content: str, calls: tuple[ToolCall, ...]) -> Body:
    """A turn of the model as a message of a request."""
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": [_call_body(one) for one in calls]}


def error_text(body: bytes) -> str:
    """What an error says, in one printable line: its message where it is JSON, else its beginning."""
    said = _error_fields(body).get("message")
    text = (
        said if isinstance(said, str) and said else body[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace")
    )
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."


def error_code(body: bytes) -> str:
    """The code of an error, or an empty string."""
    return _text(_error_fields(body).get("code"))


def is_out_of_room(status: int, body: bytes) -> bool:
    """Whether a request was refused because the conversation has outgrown the model's context."""
    told = error_code(body) == "context_length_exceeded" or _NO_ROOM.search(error_text(body)) is not None
    return status in (400, 413, 422) and told


def _error_fields(body: bytes) -> Mapping[str, JSON]:
    try:
        found: JSON = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    whole = _table(found)
    error = whole.get("error", whole)
    return {"message": error} if isinstance(error, str) else _table(error)


def _read_call(found: JSON) -> ToolCall:
    call = _table(found)
    function = _table(call.get("function"))
    name, given, id = _text(function.get("name")), function.get("arguments"), _text(call.get("id"))
    raw = _text(given) if isinstance(given, str | None) else json.dumps(given)
    if not name:
        return ToolCall("", None, raw, id, "The call names no tool; write its name as a string.")
    try:
        # Of a tool that takes nothing, some models write no arguments at all.
        arguments = read_json(raw.strip() or "{}") if isinstance(given, str | None) else given
    except ValueError as error:
        return ToolCall(name, None, raw, id, f"{name}: the arguments are no JSON ({error}); write an object.")
    if not isinstance(arguments, dict) or not is_storable(arguments):
        return ToolCall(
            name, None, raw, id, f"{name}: the arguments must be a JSON object, not {raw[:80]!r}."
        )
    return ToolCall(name, arguments, id=id)


def _unique(calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """The calls with ids, each another: by them answers are told apart."""
    taken: dict[str, ToolCall] = {}
    for number, call in enumerate(calls):
        id = call.id or f"call_{number}"
        while id in taken:
            id += "_"
        taken[id] = replace(call, id=id)
    return tuple(taken.values())


def _call_body(call: ToolCall) -> JSON:
    # Servers read the arguments of earlier calls, and some fall over those that are no JSON.
    given: JSON = {"unreadable": call.raw} if call.arguments is None else dict(call.arguments)
    function: JSON = {
        "name": _NOT_IN_NAMES.sub("_", call.name)[:64] or "unnamed",
        "arguments": json.dumps(given, ensure_ascii=False),
    }
    return {"id": call.id, "type": "function", "function": function}


def _usage(found: JSON) -> Usage | None:
    if not isinstance(found, dict):
        return None
    prompt = _count(found.get("prompt_tokens"))
    completion = _count(found.get("completion_tokens"))
    cached = _count(_table(found.get("prompt_tokens_details")).get("cached_tokens"))
    reasoning = _count(_table(found.get("completion_tokens_details")).get("reasoning_tokens"))
    return Usage(prompt, completion, min(cached, prompt), reasoning)


def _count(value: JSON) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _content(value: JSON) -> str:
    """Content is text, or a list of parts of which some are."""
    if isinstance(value, list):
        return "".join(_text(_table(part).get("text")) for part in value)
    return _text(value)


def _items(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else []


def _table(value: JSON) -> dict[str, JSON]:
    return value if isinstance(value, dict) else {}


def _text(value: JSON) -> str:
    return _encodable(value) if isinstance(value, str) else ""


def _encodable(text: str) -> str:
    """The same without halves of surrogate pairs: JSON can hold them, no file takes them."""
    return text.encode("utf-8", "replace").decode()
