"""Compares answers with labels by math-verify; a program for `agentrl/processes/forking.py`.

A request is a JSON list of the answer and the label; the reply is `equal` or `different`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sympy

# They are parsed and compared before any fork, so that no worker pays for sympy's lazy imports and for the
# tables that its parser builds.
_WARM_UP = (
    *((r"\frac{1}{2}", "0.5"), ("x^2-1", "(x-1)(x+1)"), (r"\sqrt{12}", r"2\sqrt{3}"), ("(1,2)", "(1, 3)")),
    *((r"\{1,2\}", r"\{2,1\}"), ("x=5", "5"), (r"\text{Monday}", "Monday"), (r"50\%", "0.5"), ("12", "13")),
    *((r"\frac{\pi}{2}", r"\pi/2"), ("1,234", "1234"), (r"3\cdot 10^2", "300"), ("[0, 1)", "[0,1]")),
)
_DIGITS, _MAX_EXPONENT = 50, 10_000
_EXACT = 1e-40
_DECIMAL = 1e-4
"""Relative differences up to which numbers of `_DIGITS` digits, or with a decimal, count as equal."""

NumericEquality = Callable[["sympy.Basic", "sympy.Basic", int, int], bool]


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """The function from a request to its reply. setup: nothing is read of it."""
    del setup
    _guard()
    for answer, gold in _WARM_UP:
        _is_equal(answer, gold)
    return lambda request: b"equal" if _is_equal(*json.loads(request)) else b"different"


def _guard() -> None:
    """Put `_is_close` behind math-verify's equality of numbers, wherever it compares some: by themselves, as
    elements of sets and matrices, as ends of intervals, as sides of equations."""
    from math_verify import grader

    by_library: NumericEquality = grader.sympy_numeric_eq
    grader.sympy_numeric_eq = partial(_are_equal, by_library)


def _are_equal(
    by_library: NumericEquality, a: sympy.Basic, b: sympy.Basic, float_rounding: int, numeric_precision: int
) -> bool:
    # Where this is false, math-verify simplifies the difference: two forms of one number are still equal.
    return by_library(a, b, float_rounding, numeric_precision) and _is_close(a, b)


def _is_close(a: sympy.Basic, b: sympy.Basic) -> bool:
    """Whether two expressions are equal, and not only to an absolute 1e-6 or 1e-15: by these, math-verify
    takes 1/2004! for 1/2006!."""
    import sympy

    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)) or _is_percentage_of(a, b):
        return True  # matrices come back element by element; 50% may be written as 50
    symbols = a.free_symbols | b.free_symbols
    if a.has(sympy.Float) or b.has(sympy.Float):
        # Where all symbols are 0, a small constant is not hidden by the others.
        points = ({symbol: sympy.Integer(0) for symbol in symbols}, _point(symbols))
        return all(_differ_by(_value(a, point), _value(b, point)) <= _DECIMAL for point in points)
    value = None if symbols else _value(a, {})
    if value is None or _differ_by(value, _value(b, {})) > _EXACT:
        return False
    # Exact where both are fractions of numbers that can be written out: 1 + 1/2004! has 5,700 zeros.
    is_short = sympy.Float(f"1e-{_MAX_EXPONENT}") < abs(value) < sympy.Float(f"1e{_MAX_EXPONENT}")
    difference = (a - b).doit() if is_short else sympy.Integer(0)
    return bool(difference == 0) or not difference.is_Rational


def _point(symbols: set[sympy.Basic]) -> dict[sympy.Basic, sympy.Basic]:
    import sympy

    ordered = sorted(symbols, key=str)
    return {symbol: sympy.Rational(sympy.prime(k + 7), 10) for k, symbol in enumerate(ordered)}


def _differ_by(p: sympy.Expr | None, q: sympy.Expr | None) -> float:
    """The relative difference of two numbers; 0 where neither is finite, as 1/x at 0."""
    if p is None or q is None:
        return float(p is not q)
    return float(abs(p - q) / (max(abs(p), abs(q)) or 1))


def _value(expression: sympy.Expr, point: Mapping[sympy.Basic, sympy.Basic]) -> sympy.Expr | None:
    """The number that an expression is at a point; None where it is none."""
    value = expression.subs(point).evalf(_DIGITS)
    value = value if value.is_Number else value.doit().evalf(_DIGITS)  # of 1/100, which a percentage has
    return value if value.is_number and value.is_finite else None


def _is_percentage_of(a: sympy.Expr, b: sympy.Expr) -> bool:
    from math_verify.grader import get_pct_val

    return bool(get_pct_val(a, a) == get_pct_val(b, b))


def _is_equal(answer: str, gold: str) -> bool:
    from math_verify import verify

    return bool(verify(_parsed_gold(gold), _parsed(answer), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed_gold(gold: str) -> object:
    # Siblings of a group share their label.
    return _parsed(gold)


def _parsed(expression: str) -> object:
    from math_verify import parse

    return parse(f"\\boxed{{{expression}}}", parsing_timeout=None)
