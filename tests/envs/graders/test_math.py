"""The grader `math`: the last box, math-verify, and processes that end at their limits."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from agentrl import Task, UserError
from agentrl.envs.graders import is_math_equal, last_boxed, make_grader
from agentrl.errors import GradingError, MissingExtraError
from agentrl.tools import release_shared
from tests.tools.python.sandboxed import descendants, gone

pytestmark = pytest.mark.usefixtures("released")

STAND_IN = """
import os, signal

def parse(text, parsing_timeout):
    return text

def verify(gold, answer, timeout_seconds):
    word = answer.removeprefix("\\\\boxed{").removesuffix("}")
    if word == "spin":
        while True:
            pass
    if word == "pow":  # in C, where no handler of a signal would run
        9**9**9**9
    if word == "eat":
        try:
            bytearray(4 * 2**30)
        except MemoryError:
            return False
        return True
    if word in ("SIGSEGV", "SIGKILL", "SIGALRM"):
        os.kill(os.getpid(), getattr(signal, word))
    return gold == answer
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package in the place of math-verify, which starts at once and does what an answer asks for."""
    (tmp_path / "math_verify").mkdir()
    (tmp_path / "math_verify" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "math_verify" / "grader.py").write_text("def sympy_numeric_eq(*_): return False")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"It is \boxed{4}.", "4"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{x = \boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{4} and then \boxed{5", None),
        (r"\boxed{4} and then \boxed{\frac{5}{6}", None),
        (r"\boxed{4} and then \fbox{5", None),
        (r"\boxed{x = \boxed{3}", "3"),
        (r"\boxed{5", None),
        (r"\boxed{ {5 }", None),
        (r"} \boxed{6}", "6"),
        (r"{ \boxed{6}", "6"),
        (r"\boxed{}", ""),
        ("boxed{5}", None),
        ("", None),
        (r"\boxed{" + "{" * 40_000 + "}" * 40_001, "{" * 40_000 + "}" * 40_000),
        (r"\boxed{" * 100_000, None),
        (r"\boxed{1}" + "x" * 10_000_000, None),
        ("x" * 10_000_000 + r"\boxed{1}", "1"),
    ],
)
def test_the_last_balanced_box_is_the_answer(text, content):
    assert last_boxed(text) == content


EQUAL = [
    ("1/2", "0.5"),
    (r"\frac12", "1/2"),
    ("x+1", "1+x"),
    ("(x-1)(x+1)", "x^2-1"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("1,234", "1234"),
    ("x=5", "5"),
    (r"70\text{ cm}", "70"),
    (r"\text{Monday}", "Monday"),
    (r"\frac{1}{2}", r"The result is \boxed{0.5}."),
]
DIFFERENT = [("12", "13"), ("x+1", "x+2"), ("", "1"), (r"\frac{", "2"), ("{" * 900, "2"), ("1" * 5000, "2")]
BOMBS = ["9**9**9**9", "9^{9^{9^{9}}}", "10^{10^{10}}!", r"\sum_{k=1}^{10^{12}} \sin(k^k)"]


async def test_expressions_are_compared_by_math_verify_and_no_bomb_passes_or_lasts():
    pairs = [*((*pair, True) for pair in EQUAL), *((*pair, False) for pair in DIFFERENT)]
    found = await asyncio.gather(*(is_math_equal(f"\\boxed{{{a}}}", gold) for a, gold, _ in pairs))
    assert found == [equal for _, _, equal in pairs]
    assert not await is_math_equal("5", "5")
    grade = make_grader("math", timeout_s=0.3)
    for bomb in BOMBS:
        assert await grade(Task.ask("t", "?", "3"), f"\\boxed{{{bomb}}}") == 0
    assert await is_math_equal(r"\boxed{\frac{4}{8}}", "0.5")


async def test_an_answer_that_hangs_or_crashes_gets_0_and_is_counted(stand_in):
    grade, task = make_grader("math", timeout_s=0.2), Task.ask("t", "?", "7")
    answers = ["spin", "pow", "SIGSEGV", "eat", "8", "7", "spin"] * 2
    rewards = await asyncio.gather(*(grade(task, f"\\boxed{{{answer}}}") for answer in answers))
    assert [float(reward) for reward in rewards] == [float(answer == "7") for answer in answers]
    timeouts = {
        answer: reward.parts["grader_timeout"] for answer, reward in zip(answers, rewards, strict=True)
    }
    assert timeouts == {"spin": 1, "pow": 1, "SIGSEGV": 1, "eat": 0, "8": 0, "7": 0}


async def test_the_right_one_of_several_labels_counts_although_another_comparison_hangs(stand_in):
    grade = make_grader("math", timeout_s=0.2)
    task = Task.ask("t", "?", None, answers=["6", "spin"])
    reward = await grade(task, r"\boxed{spin}")
    assert (reward, reward.parts) == (1, {"grader_timeout": 0})


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGALRM"])
async def test_what_is_no_fault_of_the_answer_is_a_typed_failure(stand_in, signal_name):
    with pytest.raises(GradingError, match="reward crashed: a process of math-verify"):
        await is_math_equal(f"\\boxed{{{signal_name}}}", "7")
    assert await is_math_equal(r"\boxed{a}", r" a ")
    assert not await is_math_equal(r"\boxed{a}", "b")


async def test_cancelled_comparisons_leave_the_pool_as_it_was(stand_in):
    calls = [asyncio.create_task(is_math_equal(r"\boxed{spin}", "7", timeout_s=0.3)) for _ in range(6)]
    await asyncio.sleep(0.3)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    for answer in ("a", "b"):
        assert not await is_math_equal(f"\\boxed{{{answer}}}", "c")


async def test_a_pool_that_dies_is_started_again(stand_in):
    before = descendants()
    assert not await is_math_equal(r"\boxed{a}", "b")
    for pid in descendants() - before:
        os.kill(pid, signal.SIGKILL)
    assert not await is_math_equal(r"\boxed{a}", "b")
    await release_shared()
    assert await gone(before)


async def test_nothing_is_left_behind_while_a_comparison_hangs(stand_in):
    before = descendants()
    call = asyncio.create_task(is_math_equal(r"\boxed{spin}", "7", timeout_s=100))
    await asyncio.sleep(0.4)
    assert descendants() - before
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await release_shared()
    assert await gone(before)


def test_nothing_outlives_a_host_that_is_killed(stand_in):
    program = textwrap.dedent(
        """
        import asyncio, os, sys
        from agentrl.envs.graders import is_math_equal

        async def main():
            await is_math_equal(r"\\boxed{a}", "b")
            print("ready", flush=True)
            await is_math_equal(r"\\boxed{spin}", "2", timeout_s=1.0)

        asyncio.run(main())
        """
    )
    search = os.pathsep.join([str(stand_in), *filter(None, sys.path)])
    host = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search}
    )
    assert host.stdout.readline() == b"ready\n"
    children = {pid for pid in descendants() if _has_in_its_command(pid, "compare.py")}
    assert children
    host.kill()
    host.wait()
    end_s = time.monotonic() + 20
    while any(_has_in_its_command(pid, "compare.py") for pid in children) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(_has_in_its_command(pid, "compare.py") for pid in children)


def _has_in_its_command(pid, word):
    try:
        return word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


async def test_deepscaler_reads_only_what_follows_the_reasoning(stand_in):
    grade, task = make_grader("deepscaler"), Task.ask("t", "?", "7")
    for answer, reward in {
        r"<think>Hm.</think> \boxed{7}": 1,
        r"<think>\boxed{7}</think> So be it.": 0,
        r"<think>\boxed{8}</think> \boxed{7}": 1,
        r"\boxed{7}": 0,
        r"<think>\boxed{7}": 0,
        r"a</think> \boxed{1} b</think> \boxed{7}": 1,
    }.items():
        assert await grade(task, answer) == reward
        assert await make_grader("deepscaler", after_think=False)(task, answer) == 1


def test_bad_settings_and_a_missing_package_are_one_sentence(monkeypatch):
    with pytest.raises(UserError, match="a timeout_s above 0, at most 3600, got 0"):
        make_grader("math", timeout_s=0)
    with pytest.raises(
        UserError, match=r"grader `math`: there is no argument `timeout`. Did you mean `timeout_s`"
    ):
        make_grader("math", timeout=1)
    with pytest.raises(UserError, match=r"grader `math`: `timeout_s` = 'soon' does not fit"):
        make_grader("math", timeout_s="soon")
    monkeypatch.setattr("agentrl.runtime.extras.find_spec", lambda module: None)
    with pytest.raises(
        MissingExtraError, match=r"grading math needs math-verify: pip install 'agentrl\[math\]'"
    ):
        make_grader("math")
