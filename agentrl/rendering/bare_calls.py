"""Calls that are JSON objects without delimiters, as Llama 3 writes them.

    {"name": "look", "parameters": {"at": "it"}}
    <|python_tag|>{"name": "look", "parameters": {"at": "it"}}; {"name": "wait", "parameters": {}}

The first is what its chat template writes. The second is what its models write, too; the servers vLLM and
SGLang read both. A turn with a call may end with <|eom_id|>, the end of a message, instead of <|eot_id|>.
"""

from __future__ import annotations

import json
import re

from agentrl.rendering.messages import read_call, unreadable_call
from agentrl.tools.json_text import read_json
from agentrl.types import JSON, ToolCall

CALL_END = "<|eom_id|>"
"""Another token that ends a turn with a call."""

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(rf"(?:[\s;,]|{re.escape(_TAG)})*")
_ARGUMENTS = ("parameters", "arguments")


def read_bare_calls(text: str, name_key: str, arguments_key: str) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a turn.

    A turn is calls where it consists of JSON objects with a name, between which blanks, `;`, `,` and tags may
    stand; otherwise it is an answer. What follows a tag is calls in any case, readable or not.
    """
    before, tag, _ = text.partition(_TAG)
    calls: list[ToolCall] = []
    start = _after_blanks(text, len(before) if tag else 0)
    while start < len(text):
        end = _end_of_object(text, start)
        calls.append(call_from_json(text[start:end], name_key, arguments_key, len(calls)))
        if not tag and not calls[-1].name:
            return text, []
        start = _after_blanks(text, end)
    return (before if tag else "" if calls else text), calls


def one_call_a_turn(calls: list[ToolCall]) -> list[ToolCall]:
    """The first call, and an error for each further one: for templates that refuse several in a turn."""
    reason = "This model takes one call a turn, and this is one more"
    return [*calls[:1], *(unreadable_call(reason, call.raw, n) for n, call in enumerate(calls[1:], 1))]


def call_from_json(text: str, name_key: str, arguments_key: str, index: int) -> ToolCall:
    """The call that a JSON object holds; arguments under the template's key, or another usual one."""
    try:
        parsed = read_json(text)
    except ValueError:
        return unreadable_call("The call is not valid JSON", text.strip(), index)
    if not isinstance(parsed, dict):
        return unreadable_call("The call is not a JSON object", text.strip(), index)
    arguments: JSON = next((parsed[key] for key in (arguments_key, *_ARGUMENTS) if key in parsed), {})
    return read_call(parsed.get(name_key), arguments, text.strip(), index)


def _after_blanks(text: str, start: int) -> int:
    blanks = _BETWEEN.match(text, start)
    return start if blanks is None else blanks.end()


def _end_of_object(text: str, start: int) -> int:
    """The end of the JSON value that begins there; that of the text where none does."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return len(text)
