"""Covering arrays: few cases that contain every allowed pair of choices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations, product

Case = Mapping[str, Hashable]
Choice = tuple[str, Hashable]


def pairs_of(case: Case) -> set[frozenset[Choice]]:
    """Every pair of choices of a case."""
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def covering(factors: Mapping[str, Sequence[Hashable]], is_allowed: Callable[[Case], bool]) -> list[Case]:
    """Cases that contain every pair of choices of the allowed cases.

    Greedy: the next case is the one with the most uncovered pairs; of several, the first in the order of
    factors. The result is near the minimum, and deterministic.
    """
    allowed = [
        case
        for values in product(*factors.values())
        if is_allowed(case := dict(zip(factors, values, strict=True)))
    ]
    pairs = {number: pairs_of(case) for number, case in enumerate(allowed)}
    uncovered = set().union(*pairs.values())
    chosen: list[Case] = []
    while uncovered:
        best = max(pairs, key=lambda number: (len(pairs[number] & uncovered), -number))
        uncovered -= pairs[best]
        chosen.append(allowed[best])
    return chosen
