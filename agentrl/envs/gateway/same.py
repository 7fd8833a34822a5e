"""Whether a client's message is one that it was sent or had sent before, and what it has changed in it.

Frameworks parse a reply, and write it again for the next request: they trim white space, order and space the
arguments of calls anew, add the defaults of a schema, make ids of their own, and drop reasoning. Such a
message is the same; its tokens are those that were sampled. Any other change makes it another message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from agentrl.types import JSON, Message, ToolCall
from agentrl.types.seams import ToolSchema


class Change(StrEnum):
    """A kind of change that leaves a message the same."""

    WHITE_SPACE = "white_space"
    ARGUMENTS = "arguments"
    DEFAULTS = "defaults"
    IDS = "ids"
    REASONING = "reasoning"
    SPLIT = "split"


class Rewriting(NamedTuple):
    """What a client changed in a message. ids: the id of each of its calls -> that of the call it is."""

    kinds: frozenset[Change] = frozenset()
    ids: Mapping[str, str] = {}


def changes(
    ours: Message, theirs: Message, ids: Mapping[str, str], tools: Sequence[ToolSchema]
) -> Rewriting | None:
    """What differs between a message and the one that a client has in its place; None = it is another one.

    ids: of the client's earlier calls -> those of ours. tools: on offer, whose defaults may be added.
    """
    if ours.role != theirs.role or ours.images != theirs.images:
        return None
    if ours.role == "tool" and ours.tool_call_id != ids.get(theirs.tool_call_id or "", theirs.tool_call_id):
        return None
    kinds = _text_changes(ours.text, theirs.text)
    if kinds is None or len(ours.tool_calls) != len(theirs.tool_calls):
        return None
    thoughts = _text_changes(ours.reasoning or "", theirs.reasoning or "")
    if thoughts is None:
        if theirs.reasoning:
            return None
        thoughts = frozenset({Change.REASONING})
    kinds |= thoughts
    own_ids: dict[str, str] = {}
    for call, written in zip(ours.tool_calls, theirs.tool_calls, strict=True):
        of_call = _call_changes(call, written, tools)
        if of_call is None:
            return None
        kinds |= of_call
        own_ids[written.id] = call.id
    return Rewriting(kinds, own_ids)


def _text_changes(ours: str, theirs: str) -> frozenset[Change] | None:
    if ours == theirs:
        return frozenset()
    return frozenset({Change.WHITE_SPACE}) if _trimmed(ours) == _trimmed(theirs) else None


def _trimmed(text: str) -> list[str]:
    """The lines without blanks at their ends, and without empty ones around the text."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _call_changes(ours: ToolCall, theirs: ToolCall, tools: Sequence[ToolSchema]) -> frozenset[Change] | None:
    if ours.name != theirs.name:
        return None
    kinds = frozenset() if ours.id == theirs.id else frozenset({Change.IDS})
    if ours.raw == theirs.raw:
        return kinds
    if ours.arguments is None or theirs.arguments is None:
        return None
    if _is_equal(dict(ours.arguments), dict(theirs.arguments)):
        return kinds | {Change.ARGUMENTS}
    schema = next((tool.parameters for tool in tools if tool.name == ours.name), {})
    if _adds_defaults(ours.arguments, theirs.arguments, schema):
        return kinds | {Change.DEFAULTS}
    return None


def _adds_defaults(ours: Mapping[str, JSON], theirs: Mapping[str, JSON], schema: Mapping[str, JSON]) -> bool:
    """Whether they differ by arguments alone that one has, and whose value is that of leaving them out."""
    shared = ours.keys() & theirs.keys()
    if not all(_is_equal(ours[name], theirs[name]) for name in shared):
        return False
    properties = schema.get("properties")
    described = properties if isinstance(properties, dict) else {}
    rest = {**ours, **theirs}
    for name in rest.keys() - shared:
        own = described.get(name)
        default = own.get("default") if isinstance(own, dict) else None
        if rest[name] is not None and not _is_equal(rest[name], default):
            return False
    return True


def _is_equal(a: JSON, b: JSON) -> bool:
    """Whether two values are the same JSON: true is not 1, and 1 is 1.0."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return a == b
