"""A task of tool calls for a model that begins with nothing: boxes, of which each names the next to open.

The last one names a value, which is the answer. What a box says is as long as real results are: mostly short,
now and then ten times as long. This module is imported by both sides, and needs neither of their packages.

A call, and an answer, is one token of the model: it learns which, and not how it is spelled.
"""

from __future__ import annotations

import json
import random

BOXES = ("zero", "one", "two", "three", "four", "five", "six", "seven")
VALUES = ("amber", "blue", "coral", "denim", "ebony", "fawn", "green", "honey")
MOST_OPENED = 3
TRAINED, HELD_OUT = range(100_000), range(1_000_000, 1_000_256)
"""The seeds of the tasks that are trained, and that are held out."""
TOOL = "open_box"
TEMPLATE = {"enable_thinking": False}
"""What both sides give the chat template: turns begin behind empty reasoning."""
_MEDIAN, _SPREAD, _LONGEST = 30.0, 0.9, 400
_FILLER = ("the", "a", "of", "and", "to", "in", "is", "on")


def call_of(box: str) -> str:
    """The token of a call, which stands between two marks in Qwen3's format."""
    return f"\n{json.dumps({'name': TOOL, 'arguments': {'box': box}})}\n"


def question(seed: int) -> str:
    """The prompt of a task."""
    return f"Open {path(seed)[0]} and follow it to a value."


def answer(seed: int) -> str:
    """Its answer."""
    return random.Random(f"value {seed}").choice(VALUES)


def content(seed: int, box: str) -> str:
    """What a box says: the next one, or the value, among other words."""
    boxes, rng = path(seed), random.Random(f"box {seed} {box}")
    if box == boxes[-1]:
        says = answer(seed)
    elif box in boxes:
        says = boxes[boxes.index(box) + 1]
    else:
        says = rng.choice(BOXES)
    return " ".join([says, *(rng.choice(_FILLER) for _ in range(_length(rng)))])


def is_right(seed: int, said: str) -> float:
    """The reward of the last message."""
    return float(said.strip() == answer(seed))


def guess(seed: int, rng: random.Random) -> list[str]:
    """A demonstration: the boxes that it opens, then what it says.

    A sixth of the calls are wrong, and half of the answers.
    """
    turns: list[str] = []
    for box in path(seed):
        turns.append(box if rng.random() < 5 / 6 else rng.choice(BOXES))
        if turns[-1] != box:
            break
    return [*turns, answer(seed) if rng.random() < 1 / 2 else rng.choice(VALUES)]


def path(seed: int) -> list[str]:
    """The boxes on the way to the value."""
    rng = random.Random(f"path {seed}")
    return rng.sample(BOXES, rng.randint(1, MOST_OPENED))


def _length(rng: random.Random) -> int:
    return min(int(_MEDIAN * rng.lognormvariate(0.0, _SPREAD)), _LONGEST)
