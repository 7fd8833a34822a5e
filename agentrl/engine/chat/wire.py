"""The JSON of `/chat/completions`, as far as an agent needs it: parsed replies, and the kinds of errors.

    {"choices": [{"finish_reason": "tool_calls", "message": {"role": "assistant", "content": null,
       "tool_calls": [{"id": "c1", "type": "function",
                       "function": {"name": "search", "arguments": "{\\"query\\": \\"Kalor\\"}"}}]}}],
     "usage": {"prompt_tokens": 31, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 16}}}

Everything that a model may write is accepted: arguments that are no JSON, calls without a name or an id, an
empty turn, a thought inside the content. Only what the endpoint itself adds (a choice with a message) is
required.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from agentrl.http.requests import LONG_BYTES, json_of
from agentrl.tools.json_text import encodable, read_json, storable
from agentrl.types import JSON, Finish, Message, ToolCall, Usage

Body = dict[str, JSON]
REASONING_FIELDS = ("reasoning_content", "reasoning")
_FINISHES = {"length": Finish.LENGTH, "content_filter": Finish.LENGTH}
_ABORTED = ("abort", "error")
_CONTEXT_OVERFLOW = re.compile(r"context[ _](?:length|window)", re.IGNORECASE)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_MAX_ERROR_CHARS = 200
_MAX_CALLS = 1_000


class ChatReply(NamedTuple):
    """A turn. body: the same as a message of the next request. usage: None = the endpoint reported none.

    reason: `finish_reason` as received. refused: the content is the model's refusal.
    """

    message: Message
    body: Body
    finish: Finish
    reason: str
    refused: bool
    usage: Usage | None


def read_reply(body: bytes) -> ChatReply:
    """Parse the turn of a reply whose values were counted. Of its calls the first 1,000 are read.

    Raises:
        ValueError: it is no reply; the message holds the reason.
    """
    reply = _table(json_of(body))
    if reply.get("error"):
        raise ValueError(f"the reply is an error: {error_text(body)}")
    choices = reply.get("choices")
    choice = _table(choices[0]) if isinstance(choices, list) and choices else {}
    if not isinstance(choice.get("message"), dict):
        raise ValueError("the reply holds no message")
    reason = _text(choice.get("finish_reason"))
    if reason in _ABORTED:
        raise ValueError(f"the endpoint ended the turn itself ({reason})")
    message = _table(choice["message"])
    calls = _unique(_read_call(call) for call in _items(message.get("tool_calls"))[:_MAX_CALLS])
    refused = not message.get("content") and bool(message.get("refusal"))
    content = _content(message.get("refusal" if refused else "content"))
    thoughts = {name: _text(message[name]) for name in REASONING_FIELDS if isinstance(message.get(name), str)}
    thought, answer = next(filter(None, thoughts.values()), None), content
    if thought is None and not refused:
        thought, answer = _split_thought(content)
    return ChatReply(
        Message("assistant", answer, thought, calls),
        {**assistant_body(content, calls), **thoughts},
        _FINISHES.get(reason, Finish.STOP),
        reason,
        refused,
        _usage(reply.get("usage")),
    )


def _split_thought(content: str) -> tuple[str | None, str]:
    """A thought and the answer after it, as an endpoint without a reasoning parser sends them.

    Where the prompt opens the thought, as for DeepSeek-R1, only its end is part of the content. A thought
    without an end is followed by no answer.
    """
    before, end, rest = content.partition("</think>")
    opens = before.lstrip().startswith("<think>")
    if not opens and (not end or "<think>" in before):
        return None, content
    return before.strip().removeprefix("<think>").strip() or None, rest.strip()


def assistant_body(content: str, calls: tuple[ToolCall, ...]) -> Body:
    """A turn of the model as a message of a request."""
    if not calls:
        return {"role": "assistant", "content": content}
    return {
        "role": "assistant",
        "content": content or None,
        "tool_calls": [_call_body(call) for call in calls],
    }


def error_text(body: bytes) -> str:
    """The text of an error in one printable line: its message where it is JSON, else its beginning."""
    message = _error_fields(body).get("message")
    text = (
        message
        if isinstance(message, str) and message
        else body[: 4 * _MAX_ERROR_CHARS].decode("utf-8", "replace")
    )
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[:_MAX_ERROR_CHARS]}..."


def error_code(body: bytes) -> str:
    """The code of an error, or an empty string."""
    return _text(_error_fields(body).get("code"))


def is_context_overflow(status: int, body: bytes) -> bool:
    """Whether a request was refused because the conversation has outgrown the model's context."""
    by_code = error_code(body) == "context_length_exceeded"
    by_text = _CONTEXT_OVERFLOW.search(error_text(body)) is not None
    return status in (400, 413, 422) and (by_code or by_text)


def _error_fields(body: bytes) -> Mapping[str, JSON]:
    try:
        fields = _table(json_of(body)) if len(body) <= LONG_BYTES else {}
    except ValueError:
        return {}
    error = fields.get("error", fields)
    return {"message": error} if isinstance(error, str) else _table(error)


def _read_call(payload: JSON) -> ToolCall:
    call = _table(payload)
    function = _table(call.get("function"))
    name, id = _text(function.get("name")), _text(call.get("id"))
    written = function.get("arguments")
    raw = _text(written) if isinstance(written, str | None) else json.dumps(written)
    if not name:
        return ToolCall("", None, raw, id, "The call names no tool; write its name as a string.")
    try:
        # For a tool without parameters, some models write no arguments at all.
        arguments = read_json(raw.strip() or "{}") if isinstance(written, str | None) else storable(written)
    except ValueError as error:
        return ToolCall(name, None, raw, id, f"{name}: the arguments are no JSON ({error}); write an object.")
    if not isinstance(arguments, dict):
        return ToolCall(
            name, None, raw, id, f"{name}: the arguments must be a JSON object, not {raw[:80]!r}."
        )
    return ToolCall(name, arguments, id=id)


def _unique(calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """The calls with distinct ids: results refer to calls by id. One that was taken gets the call's number.

    Linear in the length of all ids: once it has a number, only ids with that same number are in its way.
    """
    by_id: dict[str, ToolCall] = {}
    for number, call in enumerate(calls):
        id = call.id or f"call_{number}"
        while id in by_id:
            id += f"_{number}"
        by_id[id] = replace(call, id=id)
    return tuple(by_id.values())


def _call_body(call: ToolCall) -> JSON:
    # Servers parse the arguments of earlier calls, and some fail on arguments that are no JSON.
    arguments: JSON = {"unreadable": call.raw} if call.arguments is None else dict(call.arguments)
    function: JSON = {
        "name": _NOT_IN_NAMES.sub("_", call.name)[:64] or "unnamed",
        "arguments": json.dumps(arguments, ensure_ascii=False),
    }
    return {"id": call.id, "type": "function", "function": function}


def _usage(usage: JSON) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    prompt = _count(usage.get("prompt_tokens"))
    completion = _count(usage.get("completion_tokens"))
    cached = _count(_table(usage.get("prompt_tokens_details")).get("cached_tokens"))
    reasoning = _count(_table(usage.get("completion_tokens_details")).get("reasoning_tokens"))
    return Usage(prompt, completion, min(cached, prompt), reasoning)


def _count(value: JSON) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _content(value: JSON) -> str:
    """Content is text, or a list of parts of which some are text."""
    if isinstance(value, list):
        return "".join(_text(_table(part).get("text")) for part in value)
    return _text(value)


def _items(value: JSON) -> list[JSON]:
    return value if isinstance(value, list) else []


def _table(value: JSON) -> dict[str, JSON]:
    return value if isinstance(value, dict) else {}


def _text(value: JSON) -> str:
    return encodable(value) if isinstance(value, str) else ""
