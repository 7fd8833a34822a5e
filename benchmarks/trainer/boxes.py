"""A task of tool calls for a model that begins with nothing: boxes, of which each names the next to open.

The last one names a value, which is the answer. What a box says is as long as real results are: mostly short,
now and then ten times as long. This module is imported by both sides, and needs neither of their packages.

A call, and an answer, is one token of the model: it learns which, and not how it is spelled.
"""

from __future__ import annotations

import json
import random

NUMBER = 8
"""Boxes, and values."""
MOST_OPENED = 3
TRAINED, HELD_OUT = range(100_000), range(1_000_000, 1_000_128)
"""The seeds of the tasks that are trained, and that are held out."""
TOOL = "open_box"
_MEDIAN, _SPREAD, _LONGEST = 30.0, 0.9, 400
_FILLER = ("the", "a", "of", "and", "to", "in", "is", "on")


def opens(number: int) -> str:
    """The token that names a box."""
    return f"<box{number}>"


def value_of(number: int) -> str:
    """The token that names a value; as an answer, too."""
    return f"<value{number}>"


def call_of(number: int) -> str:
    """The token of a call, which stands between two marks in Qwen3's format."""
    return f"\n{json.dumps({'name': TOOL, 'arguments': {'number': number}})}\n"


def question(seed: int) -> str:
    """The prompt of a task."""
    return f"Open {opens(_path(seed)[0])} and follow it to a value."


def answer(seed: int) -> str:
    """Its answer."""
    return value_of(random.Random(f"value {seed}").randrange(NUMBER))


def content(seed: int, number: int) -> str:
    """What a box says: the next one, or the value, among other words."""
    path, rng = _path(seed), random.Random(f"box {seed} {number}")
    if number == path[-1]:
        says = answer(seed)
    elif number in path:
        says = opens(path[path.index(number) + 1])
    else:
        says = opens(rng.randrange(NUMBER))
    words = [rng.choice(_FILLER) for _ in range(_length(rng))]
    return " ".join([says, *words])


def is_right(seed: int, said: str) -> float:
    """The reward of the last message."""
    return float(said.strip() == answer(seed))


def guess(seed: int, rng: random.Random) -> list[str]:
    """A demonstration: the boxes that it opens, then what it says.

    A sixth of the calls are wrong, and half of the answers.
    """
    turns = []
    for number in _path(seed):
        chosen = number if rng.random() < 5 / 6 else rng.randrange(NUMBER)
        turns.append(str(chosen))
        if chosen != number:
            break
    right = rng.random() < 1 / 2
    return [*turns, answer(seed) if right else value_of(rng.randrange(NUMBER))]


def _path(seed: int) -> list[int]:
    rng = random.Random(f"path {seed}")
    return rng.sample(range(NUMBER), rng.randint(1, MOST_OPENED))


def _length(rng: random.Random) -> int:
    return min(int(_MEDIAN * rng.lognormvariate(0.0, _SPREAD)), _LONGEST)
