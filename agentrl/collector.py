"""How often Python looks for objects that refer to each other in a circle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_THRESHOLDS: Final = (50_000, 100, 100)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python's collector run less often, and leave alone what lives already.

    Thousands of episodes under way are millions of objects that live long. With Python's own thresholds (700,
    10, 10) all of them are visited again and again: a turn of 10,000 episodes takes more CPU time than one of
    128. Few objects of an episode refer to each other in a circle, so little memory waits for a collection:
    what 50,000 new objects hold. Imported modules live as long as the process.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
