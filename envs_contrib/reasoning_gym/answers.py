"""Which answers of a model may reach a scorer of the library.

Some scorers evaluate the answer, with `eval` or with sympy's `parse_expr`, which is `eval` as well. An answer
reaches them only where it is a literal, or made of numbers, one-letter variables and operators.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping

MAX_EXTRA_CHARS = 2000
"""Characters that an answer may have beyond four times those of the right one."""

_HUGE_EXPONENT = re.compile(r"\de[+-]?[\d_]{4,}", re.IGNORECASE)
_ARITHMETIC = re.compile(r"(?:\d{1,9}(?!\d)|[+\-/(). \n]|\*(?!\*)){1,400}")
_POLYNOMIAL = re.compile(
    r"(?:\d{1,18}(?![\da-z])|[a-z](?![a-z\d(])(?:\*\*\d{1,3}(?!\d))?|[+\-/() ]|\*(?!\*)){1,4000}"
)
_LITERALS = (ast.Expression, ast.List, ast.Tuple, ast.Constant, ast.UnaryOp, ast.USub, ast.Load)


def is_readable(generator: str, answer: str, right: str) -> bool:
    """Whether the scorer of a generator may read an answer.

    right: the right answer, which it always may.
    """
    if answer == right:
        return True
    if len(answer) > 4 * len(right) + MAX_EXTRA_CHARS or _HUGE_EXPONENT.search(answer):
        return False
    return generator not in READABLE or READABLE[generator](answer)


def is_literal(text: str) -> bool:
    """Whether a text is a literal of lists, tuples, numbers and strings, or no Python at all."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    return all(isinstance(node, _LITERALS) for node in ast.walk(tree))


def is_arithmetic(text: str) -> bool:
    """Whether a text has only numbers below 1e9, + - * / and parentheses: no powers, no names."""
    return _ARITHMETIC.fullmatch(text) is not None


def is_polynomial(text: str) -> bool:
    """Whether a text has only numbers, one-letter variables, their powers below 1000, + - * / and
    parentheses."""
    return _POLYNOMIAL.fullmatch(text) is not None


def is_unread(text: str) -> bool:
    """False: of these generators no other answer than the right one is read, since scoring it may not end."""
    del text
    return False


def is_a_number(text: str) -> bool:
    """Whether a text is not "not a number", which is as near to every number as that number itself."""
    return "nan" not in text.lower()


READABLE: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": is_literal,
    "complex_arithmetic": is_a_number,
    "countdown": is_arithmetic,
    "intermediate_integration": is_unread,
    "n_queens": is_literal,
    "polynomial_multiplication": is_polynomial,
    "puzzle24": is_arithmetic,
    "simple_integration": is_unread,
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
}
"""The generators whose scorers evaluate or trust the answer, and the answers that they may read."""
