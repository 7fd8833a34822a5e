"""Reads JSON that a model wrote, once, as values that can be stored, sent and walked afterwards. Writes the
values that tools return.

JSON can escape half of a surrogate pair. No UTF-8 text and no tokenizer can hold one, so it becomes `?` here.
"""

from __future__ import annotations

import json

import numpy as np
from pydantic_core import PydanticSerializationError, to_jsonable_python

from agentrl.types import JSON, Image, Message, quoted

_MAX_DEPTH = 64
NO_TEXT = (bytes, bytearray, Message, Image)
"""Types that pydantic would write, and that are no text for a model."""


def text_of(value: object) -> str:
    """A value as text: a string unchanged, any other value as JSON in one line.

    Arrays become lists, sets sorted lists. Dataclasses, models of pydantic, dates and paths are written as
    pydantic writes them.

    Raises:
        ValueError: it holds an integer of more digits than Python writes.
        TypeError: JSON has no form for a value in it.
    """
    if isinstance(value, str):
        return value
    try:
        # A value that holds itself is nested without end: that is a RecursionError, too.
        return json.dumps(value, ensure_ascii=False, check_circular=False, default=_jsonable)
    except (PydanticSerializationError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise TypeError(
            f"{quoted(value)}, which JSON cannot hold ({reason}); return text or plain data"
        ) from None


def _jsonable(value: object) -> object:
    if isinstance(value, NO_TEXT):
        raise TypeError(f"a {type(value).__name__} is no plain data")
    if isinstance(value, set | frozenset):
        # In one order: that of strings in a set differs from process to process.
        return sorted(value, key=str)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return to_jsonable_python(value)


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
    """The text with `?` for every half of a surrogate pair: no tokenizer and no file can hold one."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _is_nested_at_most(depth: int, value: JSON) -> bool:
    # Level by level: a call for each value would take as long as parsing.
    level = [value]
    for _ in range(depth + 1):
        holders = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in holders for inner in (each.values() if isinstance(each, dict) else each)]
    return not level
