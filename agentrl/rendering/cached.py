"""A cache of encodings that stays small."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

_TEXTS: Final = 16_384
_CHARACTERS: Final = 2_048

Encode = Callable[[str], tuple[int, ...]]


def cached_if_short(encode: Encode) -> Encode:
    """The same function with a cache of short texts: long ones rarely recur, and thousands fill memory."""
    cached = lru_cache(_TEXTS)(encode)
    return lambda text: cached(text) if len(text) <= _CHARACTERS else encode(text)
