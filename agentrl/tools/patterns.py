"""Patterns of schemas: run without backtracking, by the engine of pydantic (Rust's regex), and measured."""

from __future__ import annotations

from functools import lru_cache

from pydantic_core import SchemaValidator, core_schema

_NUM_CACHED = 256
_CLASS_SIZE = 16
_CLASSES = frozenset(f"\\{letter}" for letter in "pPwWdDsS")
_MAX_DIGITS = 6


@lru_cache(maxsize=_NUM_CACHED)
def compiled(pattern: str) -> SchemaValidator:
    """A validator of the texts in which a pattern is found, in time linear in the text.

    Raises:
        pydantic_core.SchemaError: it uses look-around or back-references, is no pattern, or is too large.
    """
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


@lru_cache(maxsize=_NUM_CACHED)
def pattern_size(pattern: str) -> int:
    """About the number of states of a pattern: a character is 1, a class 16, and repetitions multiply.

    Searching a text takes at most as many operations as this number times the length of the text.
    """
    totals, last, place = [1], 0, 0
    while place < len(pattern):
        token = _token(pattern, place)
        place += len(token)
        if token == "(":
            totals.append(0)
        elif token == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif token[0] == "{" and len(token) > 1:
            repeated = last * _repetitions(token)
            totals[-1] += repeated - last
            last = repeated
        elif token in ("*", "+", "?"):
            totals[-1] += 1
        else:
            last = _CLASS_SIZE if token[0] in "[." or token in _CLASSES else 1
            totals[-1] += last
    return sum(totals)


def _token(pattern: str, place: int) -> str:
    match pattern[place]:
        case "\\":
            return pattern[place : place + 2]
        case "[":
            end = place + 1
            while end < len(pattern) and pattern[end] != "]":
                end += 2 if pattern[end] == "\\" else 1
            return pattern[place : end + 1]
        case "{":
            end = pattern.find("}", place)
            return pattern[place : end + 1] if end > 0 else "{"
    return pattern[place]


def _repetitions(token: str) -> int:
    counts = [part.strip() for part in token[1:-1].split(",")]
    return max([int(part[:_MAX_DIGITS]) for part in counts if part.isascii() and part.isdigit()] + [1])
