from __future__ import annotations

import contextlib
import re
import time
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl.errors import ToolRejected
from agentrl.tools import calculate
from agentrl.tools.calculator import MAX_BITS, MAX_CHARACTERS, MAX_DEPTH


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*7", "84"),
        ("7/2", "7/2"),
        ("6/4", "3/2"),
        ("1-2-3", "-4"),
        ("8/4/2", "1"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("-2**2", "-4"),
        ("(-2)**2", "4"),
        ("2**3**2", "512"),
        ("2**-1", "1/2"),
        ("--3", "3"),
        ("+3", "3"),
        ("2--3", "5"),
        ("2*-3", "-6"),
        ("1.5*4", "6"),
        ("0.1+0.2", "3/10"),
        (".5", "1/2"),
        (" 3 *\t4 ", "12"),
        ("0**0", "1"),
        ("0**99999999999", "0"),
        ("1**99999999999", "1"),
        ("(-1)**99999999999", "-1"),
        ("(-1)**99999999998", "1"),
        ("007", "7"),
    ],
)
def test_known_results(expression, result):
    assert calculate(expression) == result


numbers = st.integers(0, 99).map(str)


def _compound(below: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = st.tuples(below, st.sampled_from(["+", "-", "*", "/", " + ", " - "]), below).map("".join)
    # In parentheses: a tower of powers would be too large for the oracle.
    exponents = st.sampled_from(["0", "1", "2", "-1", "-2", "-(1)"])
    power = st.tuples(below.map("({})".format), exponents).map("**".join)
    return binary | power | below.map("({})".format) | below.map("-{}".format)


def _oracle(expression: str) -> Fraction:
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction})


@settings(max_examples=300)
@given(st.recursive(numbers, _compound, max_leaves=8))
def test_agrees_with_python_on_random_expressions(expression):
    try:
        expected = _oracle(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolRejected, match="division by zero"):
            calculate(expression)
        return
    assume(max(expected.numerator.bit_length(), expected.denominator.bit_length()) < MAX_BITS // 4)
    assume(len(expression) <= MAX_CHARACTERS)
    assert calculate(expression) == str(expected)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9", "bits"),
        ("2**2**2**2**2**2", "bits"),
        ("(9**9)**(9**9)", "bits"),
        ("(1/3)**(10**12)", "bits"),
        ("2**-99999999999", "bits"),
        ("10**300*10**300*10**300", "bits"),
        ("1/10**300/10**300/10**300", "bits"),
        ("2**2047+2**2047", "bits"),
        ("-2**2047-2**2047", "bits"),
        ("9" * 100_000, "characters"),
        ("(" * 100_000, "characters"),
        ("(" * 150 + "1" + ")" * 150, "nested"),
        ("-" * 399 + "1", "nested"),
        ("2**" * 130 + "1", "nested"),
        ("1/0", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("0**-1", "division by zero"),
        ("4**(1/2)", "exponent 1/2 is not an integer"),
        ("", "the end where a number should be"),
        ("()", r"`\)` where a number should be"),
        ("3+", "the end where a number should be"),
        ("(3", r"the end where `\)` should be"),
        ("3)", r"`\)` where the end should be"),
        ("1 2", "`2` where the end should be"),
        ("2(3)", r"`\(` where the end should be"),
        ("the end", "'t' is not arithmetic"),
        ("2^3", r"'\^' is not arithmetic"),
        ("1e5", "'e' is not arithmetic"),
        ("__import__('os').system('true')", "'_' is not arithmetic"),
        ("٣+1", "is not arithmetic"),
        ("1\x00+1", "is not arithmetic"),
    ],
)
def test_what_is_too_large_or_not_arithmetic_is_refused_at_once(expression, reason):
    started = time.process_time()
    with pytest.raises(ToolRejected, match=reason) as refused:
        calculate(expression)
    assert time.process_time() - started < 0.1
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 160


def test_bounds_are_exactly_the_documented_ones():
    assert calculate(f"2**{MAX_BITS - 1}") == str(2 ** (MAX_BITS - 1))
    with pytest.raises(ToolRejected, match="bits"):
        calculate(f"2**{MAX_BITS}")
    assert calculate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == "1"
    with pytest.raises(ToolRejected, match="nested"):
        calculate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))
    assert calculate("1".rjust(MAX_CHARACTERS)) == "1"
    with pytest.raises(ToolRejected, match="characters"):
        calculate("1".rjust(MAX_CHARACTERS + 1))


@given(st.text(max_size=60) | st.text("0123456789+-*/(). ", max_size=MAX_CHARACTERS))
def test_any_text_gets_a_number_or_a_refusal(text):
    with contextlib.suppress(ToolRejected):
        Fraction(calculate(text))
