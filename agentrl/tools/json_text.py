"""Reads JSON that a model wrote, once, as values that can be stored, sent and walked afterwards.

JSON can escape half of a surrogate pair. No UTF-8 text and no tokenizer can hold one, so it becomes `?` here.
"""

from __future__ import annotations

import json

from agentrl.types import JSON

_MAX_DEPTH = 64


def read_json(text: str) -> JSON:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, is nested deeper than any argument, or holds a number of too many digits.
    """
    try:
        value: JSON = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    return storable(value)


def storable(value: JSON) -> JSON:
    """The value as valid Unicode.

    Raises:
        ValueError: it is nested deeper than any argument, or holds a number of too many digits.
    """
    if not _is_nested_at_most(_MAX_DEPTH, value):
        raise ValueError("nested too deep")
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        valid: JSON = json.loads(encodable(text))
        return valid
    return value


def encodable(text: str) -> str:
    """The text with `?` for every half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def _is_nested_at_most(depth: int, value: JSON) -> bool:
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(_is_nested_at_most(depth - 1, inner) for inner in below)
