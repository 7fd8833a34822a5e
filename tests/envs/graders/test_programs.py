"""The grader `code`: programs of a model against tests that they cannot see."""

from __future__ import annotations

import json
import time

import pytest

from agentrl import Task, UserError
from agentrl.envs.graders import make_grader
from agentrl.envs.graders.programs import program_of
from agentrl.errors import GradingError
from tests.tools.python.sandboxed import descendants, gone

pytestmark = pytest.mark.usefixtures("released")
QUICK = {"wall_s": 2.0, "memory_mb": 128, "sandbox": "namespaces"}

SQUARES_BY_INPUT = {"inputs": ["3\n", "4"], "outputs": ["9\n", "16\n"]}
SQUARES_BY_CALL = {"inputs": [[3], [4]], "outputs": [9, [16]], "fn_name": "square"}
CASES = [{"input": "3", "output": "9"}, {"input": "4", "output": "16"}]
ASSERTIONS = ["assert square(3) == 9", "assert square(-4) == 16"]
CHECK = "def check(candidate):\n    assert candidate(3) == 9\n    assert candidate(4) == 16\n"
READS = "print(int(input()) ** 2)"
DEFINES = "def square(x):\n    return x * x"


def task(tests, **metadata):
    """A task whose label is these tests."""
    return Task.ask("t", "?", tests if isinstance(tests, str) else json.dumps(tests), **metadata)


@pytest.mark.parametrize(
    ("tests", "metadata", "right"),
    [
        (SQUARES_BY_INPUT, {}, READS),
        (CASES, {}, READS),
        (SQUARES_BY_CALL, {}, DEFINES),
        (SQUARES_BY_CALL, {}, "class Solution:\n    def square(self, x):\n        return x * x"),
        (CASES, {"func_name": "square"}, DEFINES),
        (ASSERTIONS, {}, DEFINES),
        (ASSERTIONS, {"test_setup_code": "import math"}, DEFINES),
        (CHECK, {"entry_point": "square"}, DEFINES),
    ],
)
async def test_tests_in_the_forms_of_the_field(tests, metadata, right):
    grade = make_grader("code", **QUICK)
    assert await grade(task(tests, **metadata), f"So:\n```python\n{right}\n```\nDone.") == 1
    wrong = await grade(task(tests, **metadata), right.replace("** 2", "* 2").replace("x * x", "x + x"))
    assert (wrong, wrong.parts) == (0, {"passed": 0})


async def test_the_metadata_has_the_tests_where_it_has_any():
    grade = make_grader("code", **QUICK)
    assert await grade(Task.ask("t", "?", "9", tests=SQUARES_BY_INPUT), READS) == 1


SORTS = "class Solution:\n    def f(self, a):\n        "
STARTERS = {
    # As LeetCode shows them: annotated, and without imports.
    "List": "class Solution:\n    def f(self, a: List[int]) -> Optional[int]:\n        return sorted(a)",
    "heapq": f"{SORTS}heapq.heapify(a)\n        return [heappop(a) for _ in range(len(a))]",
    "Counter": f"{SORTS}return sorted(Counter(a).elements())",
    "defaultdict": f"{SORTS}d = defaultdict(list)\n        d[0] += a\n        return sorted(d[0])",
    "lru_cache": f"@lru_cache(None)\ndef g(n): return n\n{SORTS}return sorted(map(g, a))",
    "deep recursion": f"def g(n): return n and 1 + g(n - 1)\n{SORTS}return sorted(a)[: g(20_000)]",
    "its own main": f"{SORTS}return sorted(a)\nif __name__ == '__main__':\n    print(int(input()))",
    "dataclasses": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        f"@dataclass(order=True)\nclass P:\n    x: int\n{SORTS}return [p.x for p in sorted(map(P, a))]"
    ),
}


@pytest.mark.parametrize("name", STARTERS)
async def test_a_program_has_the_setting_of_its_benchmark(name):
    """The harness of LiveCodeBench imports names ahead, and runs no `__main__` where it calls a function."""
    tests = [{"input": "[3, 1, 2]", "output": "[1, 2, 3]", "testtype": "functional"}]
    assert await make_grader("code", **QUICK)(task(tests, func_name="f"), STARTERS[name]) == 1


@pytest.mark.parametrize("name", ["search", "count", "sample", "insert", "compile", "path"])
async def test_no_name_of_the_setting_stands_in_the_way_of_a_method(name):
    tests = [{"input": "[3]", "output": "[3]", "testtype": "functional"}]
    program = f"class Solution:\n    def {name}(self, a): return a"
    assert await make_grader("code", **QUICK)(task(tests, func_name=name), program) == 1


async def test_tests_have_the_imports_of_their_benchmark():
    tests = ["assert math.isclose(square(2), 4)", "assert os.sep and square(1) == 1"]
    assert await make_grader("code", **QUICK)(task(tests, test_imports=["import os"]), DEFINES) == 1


def test_the_program_of_many_fences_is_found_at_once():
    began_s = time.process_time()
    program_of("```" * 33_000)
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize(
    ("program", "output", "right"),
    [
        ("n = stdin.readline(); print(gcd(4, 6), max(Counter(n)) > '')", "2 True", True),
        ("def g(n): return n and 1 + g(n - 1)\nprint(g(20_000))", "20000", True),
        ("print(1, 2)\nprint(3)", "1 2 \n3\n\n", True),
        ("print('1  2')\nprint('3')", "1 2\n3", True),
        ("print(0.50)", "0.5", True),
        ("print('1\\n2')", "1 2", False),
        ("print(1)", "1\n2", False),
        ("print('yes')", "Yes", False),
        ("import sys; sys.stderr.write('noise'); print(1)", "1", True),
        ("print(1); raise SystemExit", "1", True),
        ("print(1); raise SystemExit(3)", "1", False),
        ("print(1); 1 / 0", "1", False),
        ("print(open(0).read())", "the input", True),
        ("import sys; print(sys.stdin.buffer.read().decode())", "the input", True),
        ("from __future__ import annotations\nif __name__ == '__main__': print(input())", "the input", True),
        ("1 + 1", "2", False),
        ("print(1", "1", False),
        ("print('x' * 3_000_000)", "1", False),
    ],
)
async def test_what_a_program_prints_decides(program, output, right):
    grade = make_grader("code", **QUICK)
    assert await grade(task({"inputs": ["the input"], "outputs": [output]}), program) == right


CHEATS = {
    "an object that equals everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 9\ndef square(x): return Any()"
    ),
    "a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    def __repr__(self): return '9'\n"
        "    def __hash__(self): return 9\ndef square(x): return Any(x)"
    ),
    "an early exit": "import os\nos._exit(0)",
    "an exit in the function": "import os\ndef square(x): os._exit(0)",
    "a clean exit": "import sys\ndef square(x): sys.exit(0)",
    "a changed builtin": "import builtins\nbuiltins.AssertionError = KeyError\nbuiltins.all = lambda x: True",
    "a trace of the tests": (
        "import sys, gc\ndef square(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for v in [*frame.f_locals.values()]:\n"
        "            if isinstance(v, list) and v and 'assert' in str(v): return 9\n"
        "        frame = frame.f_back\n"
        "    return 9 if any('== 9' in str(o) for o in gc.get_objects() if isinstance(o, (str, list))) else 0"
    ),
    "a printed verdict": "def square(x):\n    for n in range(9): print(n, flush=True)\n    return 0",
    "a killed parent": "import os, signal\ndef square(x): os.kill(os.getppid(), signal.SIGKILL)",
    "a forged reply": (
        "import json, os\ndef square(x):\n    for fd in range(3, 20):\n"
        "        try: os.write(fd, b'{\"value\": 9}\\n' * 9)\n"
        "        except OSError: pass\n    return 0"
    ),
    "a loop": "def square(x):\n    while True: pass",
    "a deep result": "def square(x):\n    r = []\n    for _ in range(100_000): r = [r]\n    return r",
    "a huge result": "def square(x): return [0] * 10**9",
    "a loop before any test": "while True: pass",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_cheating_passes_no_test(cheat):
    reward = await make_grader("code", **QUICK)(
        task(["assert square(3) == 9", "assert square(30) == 900"]), CHEATS[cheat]
    )
    # A forged reply is a guess, as any constant is.
    assert (reward, reward.parts) == (0, {"passed": 0.5 if cheat == "a forged reply" else 0})


async def test_values_arrive_with_their_types():
    program = (
        "def f(x): return x\n"
        "def g(): return {1: (2, [3.5]), 'a': {4, 5}, 'n': None, 'b': b'x', 'inf': float('inf')}\n"
        "def fail(): raise KeyError('x')"
    )
    tests = [
        "assert g() == {1: (2, [3.5]), 'a': {4, 5}, 'n': None, 'b': b'x', 'inf': float('inf')}",
        "assert f(True) is True and f(2**70) == 2**70 and f('ä\\n') == 'ä\\n'",
        "try:\n    fail()\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError",
        "assert f(x=1) == 1",
        "assert f(10**5000) == 10**5000",
    ]
    reward = await make_grader("code", **QUICK, score="share")(task(tests), program)
    assert reward == 1


async def test_the_share_of_passed_tests_is_a_part_and_may_be_the_score():
    program = "def square(x): return x * x if x > 0 else 0"
    reward = await make_grader("code", **QUICK)(task(ASSERTIONS), program)
    assert (reward, reward.parts) == (0, {"passed": 0.5})
    assert await make_grader("code", **QUICK, score="share")(task(ASSERTIONS), program) == 0.5
    assert await make_grader("code", **QUICK, max_tests=1)(task(ASSERTIONS), program) == 1


async def test_a_program_that_hangs_costs_at_most_the_limit_of_all_tests():
    before = descendants()
    grade = make_grader("code", **{**QUICK, "wall_s": 0.3}, total_s=0.5, score="share")
    reward = await grade(task({"inputs": ["x"] * 50, "outputs": ["y"] * 50}), "while True: pass")
    assert reward == 0
    assert len(descendants() - before) < 20


async def test_nothing_is_left_behind_by_a_program():
    from agentrl.tools import release_shared

    before = descendants()
    await make_grader("code", **QUICK)(task(SQUARES_BY_INPUT), "import os\nos.fork()\nwhile True: pass")
    await release_shared()
    assert await gone(before)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\na\n```", "a\n"),
        ("```py\na\n``` and ```\nb\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```Python\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>```\nb\n```", "b\n"),
        ("<think>a</think> b", " b"),
        ("```python\na", "a"),
        ("```python\na\n```\nNo:\n```python\nb(", "b("),
    ],
)
def test_the_program_is_the_last_block_of_python(answer, program):
    assert program_of(answer) == program


@pytest.mark.parametrize(
    "label",
    [None, "[]", "{}", '{"inputs": ["a"], "outputs": []}', "[1]", "7", "[[1]]", "#### 72", "72 cm", '["1"]'],
)
async def test_a_task_without_tests_is_a_typed_failure(label):
    with pytest.raises(GradingError, match="task t has no tests of programs") as caught:
        await make_grader("code", **QUICK)(Task.ask("t", "?", label), "print(1)")
    assert caught.value.kind == "invalid"


async def test_a_program_that_is_too_long_or_empty_gets_0():
    grade = make_grader("code", **QUICK)
    assert await grade(task(ASSERTIONS), "#" * 60_001) == 0
    assert await grade(task(ASSERTIONS), "") == 0


def test_bad_limits_are_one_sentence():
    with pytest.raises(UserError, match="needs total_s, max_tests and max_concurrency above 0"):
        make_grader("code", total_s=0)
    with pytest.raises(UserError, match="needs wall_s above 0"):
        make_grader("code", wall_s=0)
