"""Runs a program that a model wrote, and calls its functions for `suite`, which holds the tests.

It is a process of its own: the program sees the arguments of a call, never an expected value, and what it
returns arrives in `suite` as plain data. An object that equals everything, a changed builtin or an early exit
changes no test.
"""

import base64
import json
import os
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType

_SCALARS = (type(None), bool, int, str)
_MAX_DEPTH = 50


def main(names: Callable[[], dict[str, object]]) -> None:
    """Run the program, report its names, then answer calls until the pipe is closed.

    names: of `setting`. As in the harnesses of the field the program is no `__main__`: what it would do with
    its input is not run.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    sys.set_int_max_str_digits(0)
    source = str(pickle.loads(base64.b64decode(requests.readline())))
    # A module, since dataclasses look up the module of their class.
    module = sys.modules["solution"] = ModuleType("solution")
    space = vars(module)
    space["__builtins__"] = names()
    exec(compile(source, "<solution>", "exec"), space)
    cls = space.get("Solution")
    methods = [name for name in dir(cls) if not name.startswith("_")] if isinstance(cls, type) else []
    functions = [name for name, value in space.items() if callable(value) and not name.startswith("__")]
    print(json.dumps({"names": [*methods, *functions]}), file=replies, flush=True)
    for line in requests:
        name, args, kwargs = pickle.loads(base64.b64decode(line))
        reply = _Reply()
        with reply:
            function = (
                space[name] if name in space else getattr(cls() if isinstance(cls, type) else None, name)
            )
            assert callable(function), name
            reply.message = {"value": plain(function(*args, **kwargs))}
        print(json.dumps(reply.message), file=replies, flush=True)


class _Reply:
    """A reply. As a context manager it catches every exception of the program."""

    def __init__(self) -> None:
        self.message: dict[str, object] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if kind is not None:
            self.message = {"raised": kind.__name__}
        return True


def plain(value: object, depth: int = 0) -> object:
    """A value as JSON that keeps its Python type.

    Raises:
        TypeError: it is no plain data, or nested deeper than any result.
    """
    if depth > _MAX_DEPTH:
        raise TypeError("nested too deep")
    if type(value) in _SCALARS:
        return value
    if isinstance(value, dict):
        return {"dict": [[plain(key, depth + 1), plain(item, depth + 1)] for key, item in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [plain(item, depth + 1) for item in value]}
    return _scalar(value)


def _scalar(value: object) -> object:
    # Not the object's own __repr__ and __str__, which the program may have written.
    if isinstance(value, int):
        return {"int": int.__repr__(value)}
    if isinstance(value, float):
        return {"float": float.__repr__(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | complex):
        return {"literal": repr(value)}
    raise TypeError(type(value).__name__)
