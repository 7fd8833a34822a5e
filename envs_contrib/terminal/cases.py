"""Calls of the packages' functions: those of the visible tests, and seeded ones that only the grader has."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from agentrl.tools import JSON


class Case(NamedTuple):
    """A call of a function; its arguments are JSON."""

    function: str
    args: list[JSON]


VISIBLE: Mapping[str, Sequence[Case]] = {
    "intervals": (
        Case("merge", [[[4, 6], [1, 3]]]),
        Case("merge", [[[1, 10], [2, 3]]]),
        Case("merge", [[[5, 2]]]),
        Case("size", [[[1, 3], [7, 7]]]),
        Case("contains", [[[1, 3], [6, 8]], 3]),
        Case("gaps", [[[1, 3], [6, 9], [12, 12]]]),
    ),
    "ledger": (
        Case("play", [[["ann", "500"], ["ann", "ben", "500"]]]),
        Case("play", [[["ann", "300"], ["ann", "ben", "200"], ["ann", "ben", "200"]]]),
        Case("money", [1205]),
        Case("money", [5]),
        Case("richest", [[["ann", "5"], ["eva", "7"], ["ben", "7"]], 2]),
    ),
    "schedule": (
        Case("order", [{"walls": ["plan"], "plan": [], "bricks": []}]),
        Case("order", [{"a": ["b"], "b": ["a"]}]),
        Case("finish_times", [{"a": [], "b": ["a"]}, {"a": 3}]),
        Case("total", [{"c": ["a", "b"], "a": [], "b": []}, {"a": 2, "b": 3, "c": 1}]),
        Case("blocked_by", [{"c": ["b"], "b": ["a"], "a": []}, "a"]),
    ),
    "cache": (
        Case("replay", [2, [["a", "1"], ["b", "2"], ["a"], ["c", "3"]]]),
        Case("replay", [2, [["a", "1"], ["b", "2"], ["a", "5"], ["c", "3"]]]),
        Case("replay", [0, []]),
        Case("reads", [1, [["a", "1"], ["a"], ["b", "2"], ["a"], ["b"]]]),
    ),
    "grid": (
        Case("rotate", ["ab\ncd"]),
        Case("parse", ["ab\nc"]),
        Case("distance", ["....#\n#.#.#\n....#\n...#.\n.#..."]),
        Case("distance", [".#.\n.#."]),
        Case("rooms", [".#..\n###.\n...."]),
    ),
    "codec": (
        Case("encode", ["aaab"]),
        Case("decode", ["12a1b"]),
        Case("decode", ["a"]),
        Case("roman", [14]),
        Case("roman", [1944]),
        Case("counts", ["The cat. the dog, the Cat"]),
    ),
}
"""By module. Each bug of `BUGS` changes the outcome of at least one of them."""


def _intervals(rng: random.Random) -> list[Case]:
    starts = [rng.randint(0, 30) for _ in range(rng.randint(3, 6))]
    intervals: list[JSON] = [[start, start + rng.randint(0, 5)] for start in starts]
    cases = [Case(name, [intervals]) for name in ("merge", "size", "gaps")]
    return [*cases, Case("contains", [intervals, rng.randint(0, 36)])]


def _ledger(rng: random.Random) -> list[Case]:
    names = rng.sample(("ann", "ben", "cleo", "dan", "eva"), 3)
    deposits: list[JSON] = [[rng.choice(names), str(rng.randint(1, 9) * 50)] for _ in range(5)]
    transfers: list[JSON] = [[*rng.sample(names, 2), str(rng.randint(0, 6) * 50)] for _ in range(5)]
    shuffled = [*deposits[1:], *transfers]
    rng.shuffle(shuffled)
    return [
        Case("play", [[deposits[0], *shuffled]]),
        Case("richest", [deposits, rng.randint(1, 3)]),
        Case("money", [rng.randint(1, 9999)]),
    ]


def _schedule(rng: random.Random) -> list[Case]:
    names = rng.sample("abcdefghij", 6)
    jobs: dict[str, JSON] = {
        name: list(rng.sample(names[:place], rng.randint(0, min(place, 2))))
        for place, name in enumerate(names)
    }
    shuffled: dict[str, JSON] = {name: jobs[name] for name in rng.sample(names, len(names))}
    hours: dict[str, JSON] = {name: rng.randint(1, 9) for name in rng.sample(names, 4)}
    return [
        Case("order", [shuffled]),
        Case("finish_times", [shuffled, hours]),
        Case("total", [shuffled, hours]),
        Case("blocked_by", [shuffled, names[rng.randint(0, 2)]]),
    ]


def _cache(rng: random.Random) -> list[Case]:
    steps: list[JSON] = []
    for _ in range(12):
        key = rng.choice("abcd")
        steps.append([key] if rng.random() < 0.5 else [key, str(rng.randint(1, 99))])
    capacity = rng.randint(1, 3)
    return [Case("replay", [capacity, steps]), Case("reads", [capacity, steps])]


def _grid(rng: random.Random) -> list[Case]:
    height, width = rng.randint(2, 5), rng.randint(3, 7)
    text = "\n".join("".join(rng.choices(".#", (3, 1), k=width)) for _ in range(height))
    return [Case(name, [text]) for name in ("rotate", "distance", "rooms", "parse")]


def _codec(rng: random.Random) -> list[Case]:
    runs = [(rng.randint(1, 15), letter) for letter in rng.sample("abcdef", 4)]
    words = [rng.choice(("Tea", "tea", "milk,", "Milk", "rice.", "salt")) for _ in range(9)]
    return [
        Case("encode", ["".join(letter * count for count, letter in runs)]),
        Case("decode", ["".join(f"{count}{letter}" for count, letter in runs)]),
        Case("roman", [rng.randint(1, 3999)]),
        Case("counts", [" ".join(words)]),
    ]


_MAKERS: Mapping[str, Callable[[random.Random], list[Case]]] = {
    "intervals": _intervals,
    "ledger": _ledger,
    "schedule": _schedule,
    "cache": _cache,
    "grid": _grid,
    "codec": _codec,
}
_ROUNDS = 6


def hidden(module: str, rng: random.Random) -> list[Case]:
    """The cases of the grader: the visible ones, and seeded ones of every function."""
    return [*VISIBLE[module], *(case for _ in range(_ROUNDS) for case in _MAKERS[module](rng))]
