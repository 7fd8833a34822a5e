"""Problems of medium difficulty: number theory, by search or by a long loop."""

from __future__ import annotations

import random
from functools import lru_cache
from math import lcm

from envs_contrib.retool.problem import Draft, Maker

_LARGEST = 6000
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31)


@lru_cache(maxsize=1)
def _num_divisors() -> tuple[int, ...]:
    """The number of divisors of 0 (as 0), 1, 2, ..., by a sieve."""
    counts = [0] * (_LARGEST + 1)
    for divisor in range(1, _LARGEST + 1):
        for multiple in range(divisor, _LARGEST + 1, divisor):
            counts[multiple] += 1
    return tuple(counts)


def _primes(rng: random.Random) -> Draft:
    start = rng.randint(100, 2000)
    end = start + rng.randint(500, 3000)
    text = f"How many prime numbers are there from {start} to {end}?"
    cell = f"""
def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
sum(map(is_prime, range({start}, {end} + 1)))
"""
    return Draft("primes", text, lambda: _num_divisors()[start : end + 1].count(2), (cell.strip(),))


def _divisors(rng: random.Random) -> Draft:
    number, end = rng.choice((3, 4, 6, 8, 10, 12)), rng.randint(200, 1500)
    text = f"How many integers from 1 to {end} have exactly {number} positive divisors?"
    cell = f"""
def divisors(n):
    return sum(n % d == 0 for d in range(1, n + 1))
sum(divisors(n) == {number} for n in range(1, {end} + 1))
"""
    return Draft("divisors", text, lambda: _num_divisors()[1 : end + 1].count(number), (cell.strip(),))


def _divisible(rng: random.Random) -> Draft:
    a, b, c = rng.sample(range(3, 20), 3)
    end = rng.randint(1000, 9999)
    text = f"How many integers from 1 to {end} are divisible by {a} or by {b}, but not by {c}?"

    def multiples(*numbers: int) -> int:
        return end // lcm(*numbers)

    either = multiples(a) + multiples(b) - multiples(a, b)
    answer = either - (multiples(a, c) + multiples(b, c) - multiples(a, b, c))
    cell = f"sum((n % {a} == 0 or n % {b} == 0) and n % {c} != 0 for n in range(1, {end} + 1))"
    return Draft("divisible", text, lambda: answer, (cell,))


def _congruences(rng: random.Random) -> Draft:
    moduli = rng.sample(_PRIMES, 3)
    remainders = [rng.randint(1, modulus - 1) for modulus in moduli]
    (p, q, r), (a, b, c) = moduli, remainders
    text = (
        f"What is the smallest positive integer that leaves the remainder {a} when divided by {p}, {b} when "
        f"divided by {q}, and {c} when divided by {r}?"
    )
    product = p * q * r
    # The Chinese remainder theorem: each term is its remainder for one modulus, and 0 for the others.
    terms = [
        remainder * (product // modulus) * pow(product // modulus, -1, modulus)
        for modulus, remainder in zip(moduli, remainders, strict=True)
    ]
    cell = f"next(n for n in range(1, {product}) if n % {p} == {a} and n % {q} == {b} and n % {r} == {c})"
    return Draft("congruences", text, lambda: sum(terms) % product, (cell,))


def _recurrence(rng: random.Random) -> Draft:
    first, second, r, s = (rng.randint(1, 9) for _ in range(4))
    index, modulus = rng.randint(50, 400), rng.randint(101, 997)
    text = (
        f"A sequence begins with a(1) = {first} and a(2) = {second}, and goes on with a(n) = {r} a(n-1) + "
        f"{s} a(n-2). What is the remainder of a({index}) divided by {modulus}?"
    )
    cells = (
        f"a = [None, {first}, {second}]\nfor n in range(3, {index} + 1):\n"
        f"    a.append({r} * a[n - 1] + {s} * a[n - 2])",
        f"a[{index}] % {modulus}",
    )
    return Draft("recurrence", text, lambda: _linear((r, s), (first, second), index, modulus), cells)


def _linear(factors: tuple[int, int], first: tuple[int, int], index: int, modulus: int) -> int:
    """Term `index` of a linear recurrence modulo `modulus`, by powers of its matrix ((r, s), (1, 0))."""

    def times(x: list[int], y: list[int]) -> list[int]:
        (a, b, c, d), (e, f, g, h) = x, y
        product = (a * e + b * g, a * f + b * h, c * e + d * g, c * f + d * h)
        return [number % modulus for number in product]

    power, square, rest = [1, 0, 0, 1], [*factors, 1, 0], index - 2
    while rest:
        if rest % 2:
            power = times(power, square)
        square, rest = times(square, square), rest // 2
    return (power[0] * first[1] + power[1] * first[0]) % modulus


def _collatz(rng: random.Random) -> Draft:
    start = rng.randint(1000, 99_999)
    text = (
        f"Begin with {start}. Halve the number where it is even, else triple it and add one. After how many "
        "steps is it 1 for the first time?"
    )
    cell = f"""
n, steps = {start}, 0
while n != 1:
    n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
steps
"""
    return Draft("collatz", text, lambda: _collatz_steps(start), (cell.strip(),))


@lru_cache(maxsize=100_000)
def _collatz_steps(number: int) -> int:
    if number == 1:
        return 0
    # An odd number takes two steps at once: 3n + 1 is even.
    return 1 + _collatz_steps(number // 2) if number % 2 == 0 else 2 + _collatz_steps((3 * number + 1) // 2)


MAKERS: tuple[Maker, ...] = (_primes, _divisors, _divisible, _congruences, _recurrence, _collatz)
