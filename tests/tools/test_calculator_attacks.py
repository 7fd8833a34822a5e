"""The calculator does little work for any text of a model. Work is counted, not timed.

Every operation goes through `Fraction`. Counted is, for each, how many bits its result could have, before it
is known: what a bound that comes too late would have computed.
"""

from __future__ import annotations

import ast
import operator
import sys
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ToolRejected
from agentrl.tools import calculate, calculator
from agentrl.tools.calculator import MAX_BITS, MAX_CHARACTERS, MAX_DEPTH

MOST_OPERATIONS = 2 * MAX_CHARACTERS
WIDEST = 4 * MAX_BITS + 2
"""Bits of a sum of fractions within bounds before it is reduced: a/b + c/d = (ad + cb) / bd, and a sign."""


class Counted(Fraction):
    """A fraction that counts operations on it, and the widest result that each could have."""

    operations = 0
    widest = 0

    @classmethod
    def _did(cls, bits: int) -> None:
        Counted.operations += 1
        Counted.widest = max(Counted.widest, bits)


def _bits(value: Fraction | int) -> int:
    fraction = Fraction.__new__(Fraction, value) if isinstance(value, int) else value
    return max(abs(fraction.numerator).bit_length(), fraction.denominator.bit_length())


def _counting(name: str):
    plain = getattr(Fraction, name)

    def method(self: Fraction, *others: Fraction) -> Fraction | int:
        if name == "__pow__":
            Counted._did(_bits(self) * abs(int(others[0])))
        else:
            Counted._did(_bits(self) + sum(map(_bits, others)) + 1)
        result = plain(self, *others)
        return Counted(result) if isinstance(result, Fraction) else result

    return method


for _name in ("__add__", "__sub__", "__mul__", "__truediv__", "__pow__", "__neg__"):
    setattr(Counted, _name, _counting(_name))


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(calculator, "Fraction", Counted)
    Counted.operations = Counted.widest = 0
    return Counted


def spent(expression: str) -> tuple[int, int]:
    """The number of operations and the widest possible result; a refusal is fine."""
    Counted.operations = Counted.widest = 0
    with suppress(ToolRejected):
        calculate(expression)
    return Counted.operations, Counted.widest


BIG = f"2**{MAX_BITS - 1}"
ATTACKS = {
    "tower": "9**9**9",
    "tower of fractions": "(2/3)**(9**9)",
    "negative tower": "(2/3)**-(9**9)",
    "tower to the right": "**".join("9" * 50),
    "tower in parentheses": "((9**99)**99)**99",
    "small base, huge exponent": f"2**{'9' * 300}",
    "huge base, small exponent": f"{'9' * 300}**99",
    "huge negative exponent": f"(1/7)**-{'9' * 300}",
    "factors": "*".join(["9" * 98] * 4),
    "many factors": "*".join(["99"] * 130),
    "many divisions": "/".join(["97"] * 130),
    "squares of squares": "(((((((((9**9)**2)**2)**2)**2)**2)**2)**2)**2)**2",
    "sums of different denominators": "+".join(f"1/{p}" for p in range(101, 180)),
    "large denominators": f"1/({BIG}-1)+1/({BIG}-3)+1/({BIG}-5)",
    "cancelling": f"({BIG})*({BIG})/({BIG})",
    "a number with many decimals": f"0.{'1' * 390}*0.{'3' * 3}",
    "nested": "(" * 199 + "1" + ")" * 199,
    "signs": "-" * 399 + "1",
    "mixed nesting": "-(" * 130 + "1" + ")" * 130,
    "open parentheses": "(" * MAX_CHARACTERS,
    "long": "1+" * 5_000_000 + "1",
    "long blanks": " " * 5_000_000,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_expression_makes_it_work_for_long(attack, counted):
    operations, widest = spent(ATTACKS[attack])
    assert operations <= MOST_OPERATIONS
    assert widest <= WIDEST


@given(
    st.text("0123456789+-*/(). ", max_size=MAX_CHARACTERS)
    | st.from_regex(r"(9{1,9}(\*\*|[*/+-])){1,40}9{1,9}")
)
def test_no_text_at_all_makes_it_work_for_long(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calculator, "Fraction", Counted)
        operations, widest = spent(text)
    assert operations <= MOST_OPERATIONS
    assert widest <= WIDEST


def test_the_counting_sees_work_that_is_not_bounded(counted):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calculator, "MAX_BITS", 10**6)
        spent("9**9**5/9**9**5")
    assert Counted.widest > WIDEST


def test_bounds_apply_to_intermediate_results():
    with pytest.raises(ToolRejected, match="bits"):
        calculate(f"({BIG})*({BIG})/({BIG})")
    assert calculate(f"({BIG})-({BIG})") == "0"


@pytest.mark.parametrize(
    "text",
    ["٣+1", "１+1", "²", "2²", "1٫5", "½", "Ⅷ", "१२", "1_000", "0x10", "1e5", "∞", "π", "2×3", "6÷2", "−1"],
)
def test_only_ascii_digits_and_signs_are_arithmetic(text):
    with pytest.raises(ToolRejected, match=r"is not arithmetic|where the end should be"):
        calculate(text)


def test_it_never_needs_a_deep_stack():
    frames = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: event == "call" and frames.append(_depth(frame)))
    try:
        calculate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH)
    finally:
        sys.setprofile(before)
    assert max(frames) - min(frames) < 6 * (MAX_DEPTH + 2)


def _depth(frame) -> int:
    depth = 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


def test_nothing_in_it_runs_text():
    tree = ast.parse(Path(calculator.__file__).read_text(encoding="utf-8"))
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called & {"eval", "exec", "compile", "__import__", "literal_eval", "getattr"} == set()
    assert operator.truediv(*map(Fraction, (1, 3))) == Fraction(calculate("1/3"))
