"""Easy problems: a function of a power, or two in a row, the second of the first one's result.

    What is the remainder of 147^23 divided by 31?
    Let x be the digit sum of 147^23. What is the remainder of x^9 divided by 31?

Their programs are one short line each, which a model of a million parameters can learn to write.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from envs_contrib.retool.problem import Draft, Maker


class _Function(NamedTuple):
    """A function of a number: its words, its program, and its value computed in another way."""

    words: str
    program: str
    value: Callable[[int], int]


def _function(rng: random.Random, name: str) -> _Function:
    """The remainder or the digit sum of a power of the number `name`."""
    exponent, modulus = rng.randint(3, 29), rng.randint(23, 99)
    if rng.random() < 0.5:
        words = f"the remainder of {name}^{exponent} divided by {modulus}"
        return _Function(
            words, f"{name}**{exponent} % {modulus}", lambda number: pow(number, exponent, modulus)
        )
    words = f"the digit sum of {name}^{exponent}"
    return _Function(
        words, f"sum(map(int, str({name}**{exponent})))", lambda number: _digit_sum(number**exponent)
    )


def _digit_sum(number: int) -> int:
    total = 0
    while number:
        number, digit = divmod(number, 10)
        total += digit
    return total


def _power(rng: random.Random) -> Draft:
    base = rng.randint(12, 299)
    function = _function(rng, str(base))
    return Draft("power", f"What is {function.words}?", lambda: function.value(base), (function.program,))


def _two_powers(rng: random.Random) -> Draft:
    base = rng.randint(12, 299)
    first, second = _function(rng, str(base)), _function(rng, "x")
    text = f"Let x be {first.words}. What is {second.words}?"
    cells = (f"x = {first.program}; x", second.program)
    return Draft("two_powers", text, lambda: second.value(first.value(base)), cells)


MAKERS: tuple[Maker, ...] = (_power, _two_powers)
