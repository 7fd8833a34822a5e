"""The grader of programs: a model's code runs in the sandbox, against tests that it cannot see."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from agentrl.envs.graders.answer import after_thinking, tail
from agentrl.errors import GradingError, ToolError, UserError
from agentrl.runtime.gate import Gate
from agentrl.tools import PythonResult, PythonTool
from agentrl.tools.python.choice import Sandboxing
from agentrl.types import JSON, RewardParts, Task

_FENCE = re.compile(r"```[ \t]{0,9}(\w{0,20})[^\n]{0,200}\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "py", "python3")
_MAX_PROGRAM_CHARS = 60_000
_OUTPUT_BYTES = 1 << 20
_MAX_DIGITS = 100

_STDIN = """
import os as _os
def _feed(text):
    with open("stdin", "wb") as file:
        file.write(text.encode("utf-8", "replace"))
    fd, null = _os.open("stdin", _os.O_RDONLY), _os.open(_os.devnull, _os.O_WRONLY)
    _os.dup2(fd, 0)
    _os.dup2(null, 2)
    _os.unlink("stdin")
"""


class StdinTest(NamedTuple):
    """A program's standard input, and the output that it has to print."""

    input: str
    output: str


class Assertions(NamedTuple):
    """Tests that call functions: pieces of Python that raise where they fail. entry_point: "" = none."""

    tests: Sequence[str]
    entry_point: str = ""


@dataclass(frozen=True, kw_only=True)
class ProgramGrader:
    """1.0 where the program in the answer passes every test of its task, else 0.0.

    The program is the last fenced block of Python, or the whole answer. The tests are `metadata["tests"]`, or
    the label: JSON or Python, in one of the forms of the field:

        {"inputs": ["3\\n"], "outputs": ["9\\n"]}                      standard input and output (APPS, TACO)
        {"inputs": [[3]], "outputs": [9], "fn_name": "square"}       calls of a function
        [{"input": "3\\n", "output": "9\\n"}]                          likewise (LiveCodeBench)
        ["assert square(3) == 9"]                                    assertions (MBPP)
        "def check(candidate):\\n    assert candidate(3) == 9"    HumanEval, with `entry_point` in metadata

    The program runs in the sandbox of the Python tool, in a process apart from the assertions: it sees no
    expected value. The part `passed` is the share of the tests that pass.

    score: `all` = as above; `share` = the grade is the share.
    wall_s: seconds of one program with standard input, or of all assertions of a task. A test that runs
        longer fails.
    total_s: seconds of all tests of an answer; those that would begin later fail.
    memory_mb: memory of a program, in addition to the interpreter's own (2**20 bytes).
    max_tests: tests of a task that are run, the first ones.
    max_concurrency: answers graded at a time; None = one for each core.
    packages: distributions that programs may import; they must be installed.
    sandbox: as for the Python tool.

    Raises:
        UserError: a limit is not above 0; the sandbox is unknown.
    """

    score: Literal["all", "share"] = "all"
    wall_s: float = 4.0
    total_s: float = 20.0
    memory_mb: int = 512
    max_tests: int = 100
    max_concurrency: int | None = None
    packages: tuple[str, ...] = ()
    sandbox: Sandboxing = "auto"
    _tool: PythonTool = field(init=False, repr=False, compare=False)
    _gate: Gate = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        slots = (os.cpu_count() or 1) if self.max_concurrency is None else self.max_concurrency
        if min(self.total_s, self.max_tests, slots) <= 0:
            raise UserError("the grader `code` needs total_s, max_tests and max_concurrency above 0.")
        tool = PythonTool(
            packages=self.packages,
            wall_s=self.wall_s,
            cpu_s=self.wall_s,
            memory_mb=self.memory_mb,
            output_bytes=_OUTPUT_BYTES,
            max_concurrency=slots,
            sandbox=self.sandbox,
        )
        object.__setattr__(self, "_tool", tool)
        object.__setattr__(self, "_gate", Gate(slots))

    async def grade(self, task: Task, answer: str) -> RewardParts:
        """The grade of an answer.

        Waits for: a place among `max_concurrency`, then the program. Unblocked by: its limits. On
        cancellation: all of its processes end.

        Raises:
            GradingError: `invalid`, the task has no tests; otherwise the kind of the sandbox's failure.
            UserError: the kernel refuses the sandbox.
        """
        tests = _tests_of(task)
        source = program_of(answer)
        if len(source) > _MAX_PROGRAM_CHARS or not source.strip():
            return self._graded(0.0)
        try:
            async with self._gate.admitted("the sandbox"):
                return self._graded(await self._share(tests, source))
        except ToolError as error:
            raise GradingError(error.kind, f"the sandbox of the grader `code`: {error.detail}") from error

    def _graded(self, share: float) -> RewardParts:
        return RewardParts({"passed": share}, total=share if self.score == "share" else float(share == 1.0))

    async def _share(self, tests: Sequence[StdinTest] | Assertions, source: str) -> float:
        if isinstance(tests, Assertions):
            return await self._passed_assertions(tests, source)
        loop = asyncio.get_running_loop()
        end_s, chosen, passed = loop.time() + self.total_s, tests[: self.max_tests], 0
        for test in chosen:
            if loop.time() > end_s:
                break
            passes = _prints(await self._tool.run(_with_input(source, test.input)), test.output)
            passed += passes
            if not passes and self.score == "all":
                break
        return passed / len(chosen)

    async def _passed_assertions(self, suite: Assertions, source: str) -> float:
        chosen, mark = suite.tests[: self.max_tests], secrets.token_hex(16)
        solution = f"{_text('setting')}\n{_text('solution')}\nmain(names)\n"
        arguments = (solution, source, list(chosen), suite.entry_point, mark)
        program = f"{_text('setting')}\n{_text('suite')}\nrun(names(), *{arguments!r})\n"
        lines = (await self._tool.run(program)).output.splitlines()
        return sum(f"{mark} {number}" in lines for number in range(len(chosen))) / len(chosen)


@cache
def _text(name: str) -> str:
    return (Path(__file__).parent / "inside" / f"{name}.py").read_text(encoding="utf-8")


def program_of(answer: str) -> str:
    """The program in an answer: its last fenced block of Python, its last block of any kind, or all of it.

    A last block without an end is the program, too: where it is cut off, no earlier one counts.
    """
    answer = tail(answer)
    final = after_thinking(answer)
    text = answer if final is None else final
    blocks = _FENCE.findall(text)
    tagged = [code for language, code in blocks if language.lower() in _PYTHON]
    return str((tagged or [code for _, code in blocks] or [text])[-1])


def _with_input(source: str, text: str) -> str:
    # `exec` keeps what has to be the first line of a program, such as `from __future__`.
    space = "{'__name__': '__main__', '__builtins__': names()}"
    run = f"exec(compile({source!r}, '<solution>', 'exec'), {space})"
    return f"{_text('setting')}\n{_STDIN}\n_feed({text!r})\n{run}\n"


def _prints(result: PythonResult, expected: str) -> bool:
    """Whether a program printed what was expected, but for white space and forms of numbers."""
    if result.outcome != "done" or result.dropped_bytes:
        return False
    rows, wanted = _rows(result.output), _rows(expected)
    return len(rows) == len(wanted) and all(map(_is_same_row, rows, wanted))


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _is_same_row(row: list[str], wanted: list[str]) -> bool:
    return len(row) == len(wanted) and all(
        a == b or _is_same_number(a, b) for a, b in zip(row, wanted, strict=True)
    )


def _is_same_number(a: str, b: str) -> bool:
    if max(len(a), len(b)) > _MAX_DIGITS:
        return False
    try:
        return Decimal(a) == Decimal(b)
    except InvalidOperation:
        return False


def _tests_of(task: Task) -> Sequence[StdinTest] | Assertions:
    source: JSON = task.metadata.get("tests", task.answer)
    if isinstance(source, str):
        with suppress(ValueError, RecursionError):  # it is Python
            source = json.loads(source)
    tests: Sequence[StdinTest] | Assertions = ()
    if isinstance(source, str):
        called = "\ncheck(candidate)\n" if "def check(" in source else ""
        tests = Assertions([source + called], _entry_point(task))
    elif isinstance(source, dict):
        tests = _of_table(source, task)
    elif isinstance(source, list):
        tests = _of_list(source, task)
    if not (_can_fail(tests.tests) if isinstance(tests, Assertions) else tests):
        raise GradingError("invalid", f"task {task.id} has no tests of programs in its label or `tests`")
    return tests


def _can_fail(tests: Sequence[str]) -> bool:
    """Whether each test is Python that asserts something: a label of another kind may be Python, too."""
    try:
        trees = [ast.parse(test) for test in tests]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    asserting = (ast.Assert, ast.Raise)
    return bool(trees) and all(any(isinstance(node, asserting) for node in ast.walk(tree)) for tree in trees)


def _of_table(table: dict[str, JSON], task: Task) -> Sequence[StdinTest] | Assertions:
    inputs, outputs = table.get("inputs"), table.get("outputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
        return ()
    pairs = list(zip(inputs, outputs, strict=True))
    if name := table.get("fn_name") or _function(task):
        return _calls(str(name), [(arguments, [right, _alone(right)]) for arguments, right in pairs])
    return [StdinTest(_joined(fed), _joined(printed)) for fed, printed in pairs]


def _of_list(tests: list[JSON], task: Task) -> Sequence[StdinTest] | Assertions:
    if all(isinstance(test, str) for test in tests):
        imports = task.metadata.get("test_imports") or []
        setup = [*(imports if isinstance(imports, list) else [imports]), task.metadata.get("test_setup_code")]
        ahead = "".join(f"{line}\n" for line in setup if line)
        return Assertions([ahead + test for test in tests if isinstance(test, str)], _entry_point(task))
    cases = [case for case in tests if isinstance(case, dict) and "input" in case and "output" in case]
    if len(cases) < len(tests):
        return ()
    name = _function(task)
    if name and all(case.get("testtype", "functional") == "functional" for case in cases):
        return _calls(name, [(_values(case["input"]), _values(case["output"])) for case in cases])
    return [StdinTest(_joined(case["input"]), _joined(case["output"])) for case in cases]


def _entry_point(task: Task) -> str:
    return str(task.metadata.get("entry_point") or "")


def _function(task: Task) -> str:
    return str(task.metadata.get("fn_name") or task.metadata.get("func_name") or "")


def _calls(name: str, pairs: Sequence[tuple[JSON, Sequence[JSON]]]) -> Assertions:
    """Calls of a function as assertions: its arguments, and the results that are right."""
    if not name.isidentifier():
        return Assertions([])
    tests = []
    for arguments, right in pairs:
        values = arguments if isinstance(arguments, list) else [arguments]
        tests.append(
            f"_result = {name}(*{values!r})\nassert any(same(_result, value) for value in {list(right)!r})"
        )
    return Assertions(tests, name)


def _alone(expected: JSON) -> JSON:
    """The value in a list of one: APPS has expected results in such lists."""
    return expected[0] if isinstance(expected, list) and len(expected) == 1 else expected


def _values(text: JSON) -> list[JSON]:
    """The arguments, or the result, of a call: a JSON value on each line of a text."""
    if not isinstance(text, str):
        return text if isinstance(text, list) else [text]
    values: list[JSON] = []
    for line in text.splitlines():
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError):
            values.append(line)
    return values


def _joined(text: JSON) -> str:
    """Lines of a text; some data sets have them as lists."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)
