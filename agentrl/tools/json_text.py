"""Reads JSON that a model wrote; a value that cannot be stored, sent or walked afterwards is refused."""

from __future__ import annotations

import json

from agentrl.types import JSON

_MAX_DEPTH = 64


def read_json(text: str) -> JSON:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, is nested deeper than any argument, or holds half a surrogate pair.
    """
    try:
        value: JSON = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not is_storable(value):
        raise ValueError("it cannot be stored")
    return value


def is_storable(value: JSON) -> bool:
    """Whether a value can be encoded as UTF-8 and walked without overflowing the stack."""
    try:
        # Half a surrogate pair can be escaped in JSON, but neither encoded nor written to a file.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return _is_nested_at_most(_MAX_DEPTH, value)


def _is_nested_at_most(depth: int, value: JSON) -> bool:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(_is_nested_at_most(depth - 1, inner) for inner in below)
