"""Code of the grader that runs inside a fresh sandbox, next to the files that an agent left.

It imports the standard library only. It gets the arguments of the hidden tests, and never the right results:
what the agent's code prints or patches here cannot be better than what it computes.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

MOST_CHARS = 2000
_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def outcome(function: Callable[..., object], args: Sequence[object]) -> str:
    """The result of a call as text, or the name of the exception that it raised."""
    try:
        return repr(function(*args))[:MOST_CHARS]
    except _FAILURES as error:
        return f"raises {type(error).__name__}"


def grade(files: Mapping[str, str], module: str, cases: Sequence[tuple[str, Sequence[object]]]) -> None:
    """Write the files, import a module of them, and print the outcomes of its functions as JSON.

    cases: (function, arguments).
    """
    for path, text in files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    # Last, so that no file of the agent's hides one of the standard library.
    sys.path.append(os.getcwd())
    imported = importlib.import_module(module)
    outcomes = [outcome(getattr(imported, function, _missing), args) for function, args in cases]
    print(f"\n{json.dumps(outcomes)}")


def _missing(*_: object) -> object:
    raise NameError("the function is missing")
