"""Runs tests against a program that a model wrote, which runs in a process of its own (`solution`).

It is sent to the sandbox as text, followed by a call of `run`. The tests and their expected values are in
this process only. A test that passes prints a line; the host counts them.
"""

import ast
import base64
import builtins
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

_GROUPS: dict[str, Callable[[Iterable[object]], object]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_SCALARS: dict[str, Callable[[str], object]] = {"int": int, "float": float, "literal": ast.literal_eval}


def run(
    builtin_names: dict[str, object],
    solution: str,
    source: str,
    tests: Sequence[str],
    entry_point: str,
    mark: str,
) -> None:
    """Run the tests one after another, in one namespace. A passed one prints a line: `mark` and its number.

    builtin_names: of `setting`, which tests use as programs do. solution: the program that runs `solution`.
    source: the model's program. entry_point: the function that a test calls
    `candidate`; "" = none.
    """
    sys.set_int_max_str_digits(0)
    program = TestedProgram(solution)
    space: dict[str, object] = {"__name__": "tests", "__builtins__": builtin_names, "same": same}
    for name in program.start(source):
        space[name] = program.function(name)
    if entry_point:
        space["candidate"] = space[entry_point] = program.function(entry_point)
    for number, test in enumerate(tests):
        attempt = ProgramRun()
        with attempt:
            exec(compile(test, f"<test {number}>", "exec"), space)
        if attempt.passed:
            print(f"\n{mark} {number}", flush=True)


class ProgramRun:
    """Whether a block raised nothing. As a context manager it catches every exception of a test."""

    passed = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        self.passed = kind is None
        return True


class TestedProgram:
    """The model's program in a process of its own."""

    def __init__(self, solution: str) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", solution], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )

    def start(self, source: str) -> list[str]:
        """Run the program; return the names of its functions, none where it fails."""
        reply = self._exchange(source)
        names = reply.get("names")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def function(self, name: str) -> Callable[..., object]:
        """A function of the program: it returns plain data, and raises what the program raised."""

        def call(*args: object, **kwargs: object) -> object:
            reply = self._exchange((name, args, kwargs))
            if "value" in reply:
                return restored(reply["value"])
            kind = getattr(builtins, str(reply.get("raised")), RuntimeError)
            is_exception = isinstance(kind, type) and issubclass(kind, Exception)
            raise kind("the program failed") if is_exception else RuntimeError("the program failed")

        return call

    def _exchange(self, message: object) -> dict[str, object]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(base64.b64encode(pickle.dumps(message)) + b"\n")
            stdin.flush()
            reply = json.loads(stdout.readline() or b"{}")
        except (OSError, ValueError, RecursionError):
            return {}
        return reply if isinstance(reply, dict) else {}


def restored(value: object) -> object:
    """The value that `solution.plain` made JSON of.

    Raises:
        TypeError, ValueError, KeyError: it is none.
    """
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "dict":
        return {restored(key): restored(item) for key, item in inner}
    return _GROUPS[kind](map(restored, inner)) if kind in _GROUPS else _SCALARS[kind](inner)


def same(value: object, expected: object) -> bool:
    """Whether a result is the expected one; tuples count as lists, as in tests that were JSON."""
    return _listed(value) == _listed(expected)


def _listed(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return {key: _listed(item) for key, item in value.items()} if isinstance(value, dict) else value
