"""What the grader `math` takes for equal: exact arithmetic, bases of numerals and sizes of units decide."""

from __future__ import annotations

import asyncio
import math
import random
from decimal import Decimal
from fractions import Fraction
from itertools import product

import pytest
import pytest_asyncio

from agentrl import Task
from agentrl.envs.graders import is_math_equal, make_grader
from agentrl.errors import GradingError
from agentrl.tools import release_shared

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _released():
    """One pool for all tests: the event loop of the module has it."""
    yield
    await release_shared()


def factorial_share(n):
    """1/n! as a fraction, and as LaTeX."""
    return Fraction(1, math.factorial(n)), rf"\frac{{1}}{{{n}!}}"


def power(n):
    """10^-n as a fraction, and as LaTeX."""
    return Fraction(1, 10**n), rf"\frac{{1}}{{10^{{{n}}}}}"


def scientific(n, digits="6.02"):
    """A decimal times a power of ten, exactly, and as LaTeX."""
    return Fraction(digits) / 10**n, rf"{digits} \times 10^{{-{n}}}"


def one_and(n):
    """1 + 1/n!, and as LaTeX."""
    value, text = factorial_share(n)
    return 1 + value, f"1+{text}"


TINY = [
    *(factorial_share(n) for n in (30, 31, 2004, 2006)),
    *(power(n) for n in (12, 13, 40)),
    *(scientific(n) for n in (10, 23)),
    scientific(23, "6.03"),
    *(one_and(n) for n in (30, 31, 2004)),
    (Fraction(1, 10**7), "0.0000001"),
    (Fraction(2, 10**7), "0.0000002"),
    (Fraction(0), "0"),
    (Fraction(1), "1"),
    (Fraction(1, 3), r"\frac{2}{6}"),
    (Fraction(4, 12), r"\frac{4}{12}"),
]


async def test_numbers_are_equal_where_fractions_are():
    """Exact arithmetic decides; math-verify alone compares to six decimal places, or fifteen."""
    forms = ("{}", "x={}", r"\{{{}\}}", "(2,{})", r"\begin{{pmatrix}}{}\\2\end{{pmatrix}}")
    pairs = [(first, second) for first in TINY for second in TINY if first[1] < second[1]]
    cases = [(form.format(a), form.format(b), p == q) for form in forms[:1] for (p, a), (q, b) in pairs]
    cases += [(form.format(a), form.format(b), p == q) for form in forms[1:] for (p, a), (q, b) in pairs[::7]]
    found = await asyncio.gather(*(is_math_equal(f"\\boxed{{{a}}}", b) for a, b, _ in cases))
    wrong = [case for case, equal in zip(cases, found, strict=True) if equal != case[2]]
    assert wrong == []


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
        (r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}", "0"),
        (r"\tan(\pi/8)", r"\sqrt{2}-1"),
        ("0.333333", r"\frac{1}{3}"),
        ("3.141593", r"\pi"),
        (r"50\%", "0.5"),
        (r"50\%", "50"),
        (r"\frac{2x}{4}", r"\frac{x}{2}"),
        (r"\sin^2 x+\cos^2 x", "1"),
        ("12{,}000", "12000"),
        (r"12\,000", "12000"),
        ("10^-12", "10^{-12}"),
        ("0.00001", "1e-05"),
        ("0.00001", "1e-5"),
        ("1e-05", r"\frac{1}{100000}"),
    ],
)
async def test_other_forms_of_a_number_are_still_equal(gold, answer):
    assert await is_math_equal(f"\\boxed{{{answer}}}", gold)
    assert await is_math_equal(f"\\boxed{{{gold}}}", answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x+1", r"x+\frac{1}{30!}"),
        (r"\frac{x}{30!}", r"\frac{x}{31!}"),
        (r"x=1.5 \times 10^{-20}", r"x=1.6 \times 10^{-20}"),
        (r"e^{-50}", r"e^{-51}"),
        (r"5 \times 10^-12", r"5 \times 10^-13"),
        (r"12\,000", "0"),
        ("0.00001", "e-5"),
        ("1e-05", "e-5"),
        ("listen", "silent"),
    ],
)
async def test_what_math_verify_takes_for_equal_is_not(gold, answer):
    assert not await is_math_equal(f"\\boxed{{{answer}}}", gold)
    assert not await is_math_equal(f"\\boxed{{{gold}}}", answer)


DIGITS = ("11", "101", "1101", "10010")
WAYS = ("{}_{}", "{}_{{{}}}", "({})_{}", "{}_{{({})}}", r"{}_{{\text{{{}}}}}")
WORDS = {2: "two", 3: "three", 8: "eight", 10: "ten"}


async def test_numerals_are_equal_in_the_same_base_only():
    """Python's own int(digits, base) decides."""
    rng = random.Random(1)
    for _ in range(60):
        digits, (first, second) = rng.choice(DIGITS), rng.choices([*WORDS], k=2)
        a, b = rng.choices(WAYS, k=2)
        texts = [
            way.format(digits, WORDS[base] if "text" in way else base)
            for way, base in ((a, first), (b, second))
        ]
        equal = int(digits, first) == int(digits, second)
        # math-verify cannot read some ways at all, so equal ones are compared in the same way.
        if not equal or a == b:
            assert await is_math_equal(f"\\boxed{{{texts[0]}}}", texts[1]) == equal, texts


# Metres, kilograms, seconds and so on: what one of each is, by the definitions of the SI and of 1959.
METRES = {"mm": "0.001", "cm": "0.01", "m": "1", "km": "1000", "inches": "0.0254", "feet": "0.3048"}
SECONDS = {"seconds": "1", "min": "60", "hours": "3600", "days": "86400"}
CUBIC_METRES = {"ml": "0.000001", "cm^3": "0.000001", "liters": "0.001", "m^3": "1"}


@pytest.mark.parametrize("table", [METRES, SECONDS, CUBIC_METRES])
async def test_quantities_with_one_number_are_equal_where_their_units_are(table):
    forms = (r"4\text{{ {}}}", "4 {}", r"4\,\mathrm{{{}}}", r"\frac{{1}}{{2}}\text{{ {}}}")
    for form in forms:
        for (first, size), (second, other) in product(table.items(), repeat=2):
            if first != second:
                a, b = form.format(first), form.format(second)
                equal = await is_math_equal(f"\\boxed{{{a}}}", b)
                assert not (equal and Decimal(size) != Decimal(other)), (a, b)
        assert await is_math_equal(f"\\boxed{{{forms[0].format('cm')}}}", "4")


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"4\text{ m}", r"4\text{ meters}", True),
        (r"4\text{ cm}^2", r"4\text{ square centimeters}", True),
        (r"4\text{ cm}^2", r"4\text{ cm}^3", False),
        (r"4\text{ km/h}", r"4\text{ m/s}", False),
        (r"4\text{ km/h}", r"4\text{ kilometers per hour}", True),
        (r"\$4", r"4\text{ dollars}", True),
        (r"\$4", r"4\text{ cents}", False),
        (r"20^\circ\text{C}", r"20^\circ", True),
        (r"20^\circ\text{C}", r"20^\circ\text{F}", False),
        (r"10\text{ AM}", r"10\text{ PM}", False),
        (r"4\text{ apples}", r"4\text{ fruits}", True),
    ],
)
async def test_units_in_the_spellings_that_models_write(gold, answer, equal):
    assert await is_math_equal(f"\\boxed{{{answer}}}", gold) == equal


@pytest.mark.parametrize("label", [None, "", "  "])
async def test_a_task_without_a_label_is_a_failure_and_no_zero(label):
    for name in ("math", "deepscaler"):
        with pytest.raises(GradingError, match="t: the task has no label to grade by"):
            await make_grader(name)(Task.ask("t", "?", label), r"</think>\boxed{}")
