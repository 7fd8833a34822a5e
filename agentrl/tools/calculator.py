"""Exact arithmetic for a model: integers and fractions, nothing else, and never `eval`.

    sum     = product (("+" | "-") product)*
    product = signed (("*" | "/") signed)*
    signed  = ("-" | "+") signed | power
    power   = atom ["**" signed]
    atom    = number | "(" sum ")"

Precedence is Python's: `-2**2` is -4, `2**3**2` is 512. Every size is bounded before it is computed.
"""

from __future__ import annotations

import re
from fractions import Fraction

from agentrl.errors import ToolRejected
from agentrl.tools.base import tool

MAX_CHARACTERS = 400
MAX_DEPTH = 40
MAX_BITS = 2048
"""Of the numerator and the denominator of every intermediate result: 616 decimal digits."""

_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+|\*\*|[-+*/()])")
_END = "the end"


@tool(inline=True)
def calculate(expression: str) -> str:
    """Compute an arithmetic expression exactly.

    Knows + - * / ** and parentheses. The result is an integer such as 42 or a fraction such as 7/2.

    Args:
        expression: what to compute, such as (3+4)*2
    """
    tokens = _tokens(expression)
    parser = _Parser(tokens)
    value = parser.sum(depth=0)
    parser.expect(_END)
    return str(value)


def _tokens(expression: str) -> list[str]:
    if len(expression) > MAX_CHARACTERS:
        raise ToolRejected(
            f"the expression has {len(expression)} characters; write at most {MAX_CHARACTERS} in one call."
        )
    text = expression.strip()
    tokens = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            wrong = text[at:].lstrip()[:1]
            raise ToolRejected(f"{wrong!r} is not arithmetic; use numbers, + - * / ** and parentheses only.")
        tokens.append(match[1])
        at = match.end()
    return [*tokens, _END]


class _Parser:
    """Reads the tokens once, from left to right; the methods are the grammar's rules."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while (sign := self._take("+", "-")) is not None:
            right = self._product(depth)
            value = _bounded(value + right if sign == "+" else value - right)
        return value

    def expect(self, token: str) -> None:
        if self._take(token) is None:
            actual = self._tokens[self._at]
            raise ToolRejected(f"the expression has {_quoted(actual)} where {_quoted(token)} should be.")

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while (operator := self._take("*", "/")) is not None:
            right = self._signed(depth)
            value = _bounded(value * right if operator == "*" else _divide(value, right))
        return value

    def _signed(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ToolRejected(f"the expression is nested more than {MAX_DEPTH} deep; split it into several.")
        sign = self._take("-", "+")
        if sign is None:
            return self._power(depth)
        value = self._signed(depth + 1)
        return -value if sign == "-" else value

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        return base if self._take("**") is None else _raise(base, self._signed(depth + 1))

    def _atom(self, depth: int) -> Fraction:
        if self._take("(") is not None:
            value = self.sum(depth + 1)
            self.expect(")")
            return value
        token = self._tokens[self._at]
        if not token[-1].isdigit():
            raise ToolRejected(f"the expression has {_quoted(token)} where a number should be.")
        self._at += 1
        return _bounded(Fraction(token))

    def _take(self, *candidates: str) -> str | None:
        token = self._tokens[self._at]
        if token not in candidates:
            return None
        self._at += 1
        return token


def _quoted(token: str) -> str:
    return token if token == _END else f"`{token}`"


def _divide(value: Fraction, by: Fraction) -> Fraction:
    if not by:
        raise ToolRejected("division by zero has no result; check the divisor.")
    return value / by


def _raise(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolRejected(f"the exponent {exponent} is not an integer; only whole powers are exact.")
    power = exponent.numerator
    if not base and power < 0:
        raise ToolRejected("division by zero has no result; 0 has no negative power.")
    # b bits to the n-th power have more than (b - 1) * n bits; 0, 1 and -1 stay small at any power.
    if (_bits(base) - 1) * abs(power) > MAX_BITS:
        raise _too_large()
    if abs(base) == 1:
        return base if power % 2 else Fraction(1)
    return _bounded(Fraction(base**power)) if base else Fraction(int(power == 0))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise _too_large()
    return value


def _too_large() -> ToolRejected:
    return ToolRejected(f"a number on the way has more than {MAX_BITS} bits; work with smaller numbers.")
