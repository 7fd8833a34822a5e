"""The task of the benchmarks' episodes: a question, a phrase for tool results, the answer.

It imports only the standard library, so that the interpreter of another package can load it.
"""

from __future__ import annotations

from typing import Final

QUESTION: Final = "What is behind the tower at the end of the market?"
ANSWER: Final = "silver"
_PHRASE: Final = "the river runs past the castle to the market and the garden "


def text_of(payload: int) -> str:
    """A text of `payload` characters."""
    return (_PHRASE * (payload // len(_PHRASE) + 1))[:payload]
