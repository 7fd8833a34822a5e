"""Covering arrays: few cases in which every two choices that may go together do so once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations, product

Case = Mapping[str, Hashable]
Choice = tuple[str, Hashable]


def pairs_of(case: Case) -> set[frozenset[Choice]]:
    """Every two choices of a case."""
    return {frozenset(two) for two in combinations(case.items(), 2)}


def covering(factors: Mapping[str, Sequence[Hashable]], may_be: Callable[[Case], bool]) -> list[Case]:
    """Cases that hold every pair of choices that any allowed case holds.

    Greedy: the case that covers the most new pairs comes next; of several, the first in the order of factors.
    That is near the fewest that are possible, and the same every time.
    """
    allowed = [
        case
        for values in product(*factors.values())
        if may_be(case := dict(zip(factors, values, strict=True)))
    ]
    pairs = {number: pairs_of(case) for number, case in enumerate(allowed)}
    open_ = set().union(*pairs.values())
    chosen: list[Case] = []
    while open_:
        best = max(pairs, key=lambda number: (len(pairs[number] & open_), -number))
        open_ -= pairs[best]
        chosen.append(allowed[best])
    return chosen
