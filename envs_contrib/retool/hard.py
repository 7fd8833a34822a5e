"""Hard problems: counting and optimisation, by dynamic programming or a simulation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from math import comb

from envs_contrib.retool.problem import Draft, Maker


def _coins(rng: random.Random) -> Draft:
    coins = tuple(sorted(rng.sample(range(3, 26), 4)))
    amount = rng.randint(60, 160)
    listed = f"{', '.join(map(str, coins[:-1]))} and {coins[-1]}"
    text = (
        f"In how many ways can {amount} cents be paid with coins of {listed} cents, where the order of the "
        "coins does not matter?"
    )
    cells = (
        f"ways = [1] + [0] * {amount}\nfor coin in {list(coins)}:\n"
        f"    for amount in range(coin, {amount} + 1):\n        ways[amount] += ways[amount - coin]",
        f"ways[{amount}]",
    )
    return Draft("coins", text, lambda: _ways(amount, coins), cells)


@lru_cache(maxsize=100_000)
def _ways(amount: int, coins: tuple[int, ...]) -> int:
    """The number of ways, by how often the last coin is used."""
    if not coins:
        return int(amount == 0)
    return sum(_ways(rest, coins[:-1]) for rest in range(amount, -1, -coins[-1]))


def _paths(rng: random.Random) -> Draft:
    width, height = rng.randint(6, 14), rng.randint(6, 14)
    points = [(x, y) for x in range(1, width) for y in range(1, height)]
    blocked = sorted(rng.sample(points, 2))
    (a, b), (c, d) = blocked
    text = (
        f"A walk goes from the point (0, 0) to ({width}, {height}) in steps of one to the right or one up. "
        f"How many such walks avoid both of the points ({a}, {b}) and ({c}, {d})?"
    )
    cell = f"""
from functools import cache
@cache
def walks(x, y):
    if x < 0 or y < 0 or (x, y) in {blocked}:
        return 0
    return 1 if x == y == 0 else walks(x - 1, y) + walks(x, y - 1)
walks({width}, {height})
"""

    def between(x: int, y: int) -> int:
        return comb(x + y, x) if x >= 0 and y >= 0 else 0

    # Inclusion and exclusion of the walks through each point, and through both.
    through = [between(x, y) * between(width - x, height - y) for x, y in blocked]
    both = between(a, b) * between(c - a, d - b) * between(width - c, height - d)
    return Draft("paths", text, lambda: between(width, height) - sum(through) + both, (cell.strip(),))


def _subsets(rng: random.Random) -> Draft:
    size, modulus = rng.randint(10, 30), rng.randint(3, 14)
    remainder = rng.randrange(1, modulus)
    text = (
        f"How many subsets of the integers from 1 to {size} have a sum that leaves the remainder {remainder} "
        f"when divided by {modulus}?"
    )
    cells = (
        f"counts = [1] + [0] * {modulus - 1}\nfor n in range(1, {size} + 1):\n"
        f"    counts = [counts[r] + counts[(r - n) % {modulus}] for r in range({modulus})]",
        f"counts[{remainder}]",
    )
    return Draft("subsets", text, lambda: sum(_distinct_sums(size)[remainder::modulus]), cells)


@lru_cache(maxsize=64)
def _distinct_sums(size: int) -> tuple[int, ...]:
    """The number of subsets of 1 to `size` by their sum: the coefficients of the product of 1 + x^k."""
    coefficients = [1]
    for k in range(1, size + 1):
        shifted = [0] * k + coefficients
        padded = coefficients + [0] * k
        coefficients = [x + y for x, y in zip(padded, shifted, strict=True)]
    return tuple(coefficients)


def _partitions(rng: random.Random) -> Draft:
    number, largest = rng.randint(40, 150), rng.randint(16, 30)
    text = (
        f"In how many ways can {number} be written as a sum of different positive integers of at most "
        f"{largest}, where the order does not matter?"
    )
    cell = f"""
from functools import cache
@cache
def ways(rest, largest):
    if rest == 0:
        return 1
    return 0 if rest < 0 or largest == 0 else ways(rest, largest - 1) + ways(rest - largest, largest - 1)
ways({number}, {largest})
"""
    return Draft("partitions", text, lambda: _distinct_sums(largest)[number], (cell.strip(),))


def _words(rng: random.Random) -> Draft:
    letters, run, length, modulus = (
        rng.randint(2, 5),
        rng.randint(3, 4),
        rng.randint(10, 40),
        rng.randint(101, 997),
    )
    text = (
        f"Words of {length} letters are made of {letters} different letters, so that no letter stands {run} "
        f"times in a row. What is the remainder of the number of such words divided by {modulus}?"
    )
    cells = (
        f"runs = [{letters}] + [0] * {run - 2}\nfor _ in range({length - 1}):\n"
        f"    runs = [sum(runs) * {letters - 1}] + runs[:-1]",
        f"sum(runs) % {modulus}",
    )
    # By the length of the last run: f(n) = (letters - 1) (f(n-1) + ... + f(n-run+1)).
    totals = [letters**n for n in range(run)]
    for n in range(run, length + 1):
        totals.append((letters - 1) * sum(totals[n - run + 1 : n]))
    return Draft("words", text, lambda: totals[length] % modulus, cells)


def _knapsack(rng: random.Random) -> Draft:
    items = [(rng.randint(5, 30), rng.randint(10, 99)) for _ in range(9)]
    capacity = rng.randint(45, 90)
    listed = ", ".join(f"({weight}, {value})" for weight, value in items)
    text = (
        f"Of these objects, written as (weight, value), each can be taken once: {listed}. What is the "
        f"largest total value with a total weight of at most {capacity}?"
    )
    cells = (
        f"best = [0] * ({capacity} + 1)\nfor weight, value in {items}:\n"
        f"    for room in range({capacity}, weight - 1, -1):\n"
        "        best[room] = max(best[room], best[room - weight] + value)",
        "best[-1]",
    )
    return Draft("knapsack", text, lambda: _largest_value(items, capacity), cells)


def _largest_value(items: Sequence[tuple[int, int]], capacity: int) -> int:
    """The largest value of all subsets that are light enough."""
    chosen = (subset for size in range(len(items) + 1) for subset in combinations(items, size))
    fitting = (subset for subset in chosen if sum(weight for weight, _ in subset) <= capacity)
    return max(sum(value for _, value in subset) for subset in fitting)


def _josephus(rng: random.Random) -> Draft:
    people, step = rng.randint(50, 999), rng.randint(3, 30)
    text = (
        f"{people} people in a circle are numbered from 1 on. Counting from number 1, every {step}th of "
        "those who are left leaves. Which number is the last one left?"
    )
    cell = f"""
circle, place = list(range(1, {people} + 1)), 0
while len(circle) > 1:
    place = (place + {step} - 1) % len(circle)
    circle.pop(place)
circle[0]
"""
    return Draft("josephus", text, lambda: _last_left(people, step), (cell.strip(),))


def _last_left(people: int, step: int) -> int:
    """By the recurrence over the number of people: numbers begin at 1."""
    place = 0
    for size in range(2, people + 1):
        place = (place + step) % size
    return place + 1


MAKERS: tuple[Maker, ...] = (_coins, _paths, _subsets, _partitions, _words, _knapsack, _josephus)
