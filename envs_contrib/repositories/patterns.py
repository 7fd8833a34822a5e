"""Texts by chance, from patterns.

«ann|ben»          one of the choices, which may hold patterns; an empty choice is one
«1..9»             a whole number, both ends included
«2..4*x«1..9»»     a pattern, so many times, each time with other choices
¦                  a bar that separates nothing
"""

from __future__ import annotations

import random
import re

_OPEN, _CLOSE = "«", "»"
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_TIMES = re.compile(r"(\d+)\.\.(\d+)\*")


def filled(pattern: str, rng: random.Random) -> str:
    """A text of a pattern.

    Raises:
        ValueError: it has a bracket without its other half.
    """
    parts, rest = [], pattern
    while _OPEN in rest:
        before, _, rest = rest.partition(_OPEN)
        inside, rest = _split(rest)
        parts += [before, _chosen(inside, rng)]
    return "".join([*parts, rest]).replace("¦", "|")


def _split(text: str) -> tuple[str, str]:
    """What stands before the bracket that closes, and behind it."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == _OPEN) - (character == _CLOSE)
        if depth == 0:
            return text[:place], text[place + 1 :]
    raise ValueError(f"a bracket is not closed: {text[:40]!r}")


def _chosen(inside: str, rng: random.Random) -> str:
    if times := _TIMES.match(inside):
        count = rng.randint(int(times[1]), int(times[2]))
        return "".join(filled(inside[times.end() :], rng) for _ in range(count))
    choice = rng.choice(_choices(inside))
    if bounds := _RANGE.fullmatch(choice):
        return str(rng.randint(int(bounds[1]), int(bounds[2])))
    return filled(choice, rng)


def _choices(inside: str) -> list[str]:
    """The parts between bars that are in no further bracket."""
    choices, depth = [""], 0
    for character in inside:
        depth += (character == _OPEN) - (character == _CLOSE)
        if character == "|" and depth == 0:
            choices.append("")
        else:
            choices[-1] += character
    return choices
