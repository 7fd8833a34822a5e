"""The best policy of a small world with a transition table, by value iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol, cast

import gymnasium

Outcomes = Sequence[tuple[float, int, float, bool]]
Transitions = Mapping[int, Mapping[int, Outcomes]]
"""P[state][action]: (probability, next state, reward, whether it ends) of each outcome."""


class _Tabular(Protocol):
    P: Transitions


@lru_cache(maxsize=8)
def transitions(gym_id: str) -> Transitions:
    """The table `P` of one of Gymnasium's small worlds."""
    world = gymnasium.make(gym_id)
    table = cast(_Tabular, world.unwrapped).P
    world.close()
    return table


@lru_cache(maxsize=8)
def best_actions(gym_id: str, tolerance: float = 1e-10) -> tuple[int, ...]:
    """For every state the action with the highest expected return, without a discount.

    Value iteration (Sutton and Barto, Reinforcement Learning, 2018, section 4.4) until no value moves
    by more than `tolerance`. All values start at 0, or lower where a step costs something, so that
    no value exceeds a reachable return. Of several equal actions the first is taken.
    """
    table = transitions(gym_id)
    values = [0.0] * len(table)
    moved = 1.0
    while moved > tolerance:
        updated = [max(_worth(outcomes, values) for outcomes in table[state].values()) for state in table]
        moved = max(abs(new - old) for new, old in zip(updated, values, strict=True))
        values = updated
    return tuple(
        max(table[state], key=lambda action: round(_worth(table[state][action], values), 6))
        for state in table
    )


def _worth(outcomes: Outcomes, values: Sequence[float]) -> float:
    return sum(
        chance * (reward + (0.0 if ends else values[after])) for chance, after, reward, ends in outcomes
    )
