"""A cache of encodings that stays small."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

_SHORT_TEXTS: Final = 16_384
_SHORT: Final = 2_048
_LONG_TEXTS: Final = 16
_LONG: Final = 262_144

Encode = Callable[[str], tuple[int, ...]]


def cached_encode(encode: Encode) -> Encode:
    """The same function with a cache of short texts, and of the latest long ones.

    Thousands of long texts would fill memory, and few recur: the prompt that the siblings of a group share,
    who begin one after the other.
    """
    short, long = lru_cache(_SHORT_TEXTS)(encode), lru_cache(_LONG_TEXTS)(encode)

    def cached(text: str) -> tuple[int, ...]:
        if len(text) <= _SHORT:
            return short(text)
        return long(text) if len(text) <= _LONG else encode(text)

    return cached
