"""Compares answers with labels by math-verify; a program for `agentrl/forking.py`.

A request is a JSON list of the answer and the label; the reply is `equal` or `different`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache

# They are parsed and compared before any fork, so that no worker pays for sympy's lazy imports and for the
# tables that its parser builds.
_WARM_UP = (
    *((r"\frac{1}{2}", "0.5"), ("x^2-1", "(x-1)(x+1)"), (r"\sqrt{12}", r"2\sqrt{3}"), ("(1,2)", "(1, 3)")),
    *((r"\{1,2\}", r"\{2,1\}"), ("x=5", "5"), (r"\text{Monday}", "Monday"), (r"50\%", "0.5"), ("12", "13")),
    *((r"\frac{\pi}{2}", r"\pi/2"), ("1,234", "1234"), (r"3\cdot 10^2", "300"), ("[0, 1)", "[0,1]")),
)


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """The function from a request to its reply. setup: nothing is read of it."""
    del setup
    for answer, gold in _WARM_UP:
        _is_equal(answer, gold)
    return lambda request: b"equal" if _is_equal(*json.loads(request)) else b"different"


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
