"""The Python tool as environments and models use it."""

from __future__ import annotations

import asyncio

import pytest

from agentrl import Limits, Script, ScriptedAgent, Task, ToolEnv, UserError, call, play, say
from agentrl.envs.check import check_env_async
from agentrl.errors import ToolError, ToolRejected
from agentrl.tools import release_shared
from agentrl.tools.python import PythonTool
from agentrl.tools.python.tool import MOST_CODE_BYTES
from tests.tools.python.sandboxed import QUICK, python, result

BACKENDS = ("namespaces", "none")


@pytest.mark.parametrize("sandbox", BACKENDS)
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(1 + 1)", "2"),
        ("1 + 1", "2"),
        ("x = 5\nx", "5"),
        ("x = 5", "(no output)"),
        ("None", "(no output)"),
        ("print('a', end='')\n'b'", "a'b'"),
        ("", "(no output)"),
        ("# nothing", "(no output)"),
        ("import sys; sys.stderr.write('err\\n'); print('out')", "err\nout"),
        ("print('grüße 漢字 🎉')", "grüße 漢字 🎉"),
        ("print('\\ud800')", "\\ud800"),
        ("import sys; _ = sys.stdout.buffer.write(b'\\xff\\n')", "\N{REPLACEMENT CHARACTER}"),
        ("exit()", "(no output)"),
        ("import sys; print(__name__, sys.argv, __builtins__ is not None)", "__main__ [''] True"),
        ("```python\nprint('fenced')\n```", "fenced"),
        ("```\nprint('fenced')", "fenced"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 3\nP()", "P(x=3)"),
        ("import asyncio\nasync def f(): return 4\nasyncio.run(f())", "4"),
        (
            "import concurrent.futures as c\nwith c.ThreadPoolExecutor(2) as p: list(p.map(abs, [1]))",
            "(no output)",
        ),
        ("import subprocess, sys; subprocess.check_output([sys.executable, '-c', 'print(3)'])", "b'3\\n'"),
        ("import sqlite3; sqlite3.connect(':memory:').execute('select 1 + 1').fetchone()", "(2,)"),
    ],
)
async def test_what_code_prints_is_the_answer(code, printed, sandbox):
    async with python(sandbox=sandbox) as tool:
        assert await tool.invoke({"code": code}) == printed


@pytest.mark.parametrize("sandbox", BACKENDS)
async def test_a_traceback_begins_at_the_models_own_first_line(sandbox):
    async with python(sandbox=sandbox) as tool:
        with pytest.raises(ToolRejected) as rejected:
            await tool.invoke({"code": "def half(x):\n    return x / 0\nprint('before')\nhalf(4)"})
    assert rejected.value.kind == "error"
    lines = str(rejected.value).splitlines()
    assert lines[0] == "before"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2] == '  File "<python>", line 4, in <module>'
    assert "return x / 0" in str(rejected.value)
    assert lines[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        ("x = = 1", "error", "SyntaxError: invalid syntax"),
        ("def f(): return f()\nf()", "error", "RecursionError"),
        ("import sys; sys.exit('bad input')", "error", "exit: bad input"),
        ("import os; os._exit(7)", "ended", "The interpreter was left (exit code 7)."),
        ("import os; os.abort()", "signal", "The interpreter crashed (SIGABRT)."),
        ("print('so far')\nwhile True: pass", "timeout", "so far\nIt was stopped: it ran longer than 0.5 s."),
        ("input()", "error", "EOFError"),
        ("import numpy", "error", "ModuleNotFoundError"),
        ("raise KeyboardInterrupt", "error", "KeyboardInterrupt"),
    ],
)
async def test_a_mistake_of_the_model_is_text_and_counted_by_kind(code, kind, sentence):
    async with python(wall_s=0.5) as tool:
        with pytest.raises(ToolRejected) as rejected:
            await tool.invoke({"code": code})
    assert rejected.value.kind == kind
    assert sentence in str(rejected.value)


async def test_a_long_traceback_is_cut_in_the_middle():
    code = "def f(n): return g(n)\ndef g(n): return f(n - 1) if n else 1 / 0\nf(200)"
    report = await result(code)
    assert "lines are left out" in report.output
    assert report.output.endswith("ZeroDivisionError: division by zero\n")
    assert len(report.output.splitlines()) < 60


async def test_code_that_is_too_long_is_refused_before_it_runs():
    async with python() as tool:
        with pytest.raises(ToolRejected, match="too long") as rejected:
            await tool.invoke({"code": "#" * (MOST_CODE_BYTES + 1)})
        assert rejected.value.kind == "length"
        assert await tool.invoke({"code": "#" * (MOST_CODE_BYTES - 2) + "\n1"}) == "1"


PLANT = """
import json, os, signal, sys, threading, time, math, random, types
json.planted = 1
sys.modules["ghost"] = types.ModuleType("ghost")
math.pi = 3
open("planted", "w").write("x")
os.environ["PLANTED"] = "1"
os.chdir("/")
signal.signal(signal.SIGUSR1, lambda *_: None)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
sys.setrecursionlimit(77)
random.seed(99)
import builtins; builtins.planted = 1
planted = 1
print(random.random())
"""
LOOK = """
import json, math, os, random, signal, sys, threading
print(hasattr(json, "planted"), "ghost" in sys.modules, round(math.pi, 2), os.listdir("/tmp"))
print(os.environ.get("PLANTED"), os.getcwd(), signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
print(threading.active_count(), sys.getrecursionlimit(), random.random() == 0.8444218515250481)
print("planted" in dir(), hasattr(__builtins__, "planted"))
"""


async def test_without_state_a_call_finds_nothing_of_the_previous_call():
    async with python() as tool:
        fresh = await tool.invoke({"code": LOOK})
        assert fresh == "False False 3.14 []\nNone /tmp True\n1 1000 True\nFalse False"
        assert float(await tool.invoke({"code": PLANT})) > 0
        assert await tool.invoke({"code": LOOK}) == fresh


@pytest.mark.parametrize("sandbox", BACKENDS)
async def test_with_state_variables_persist_for_one_episode(sandbox):
    tool = PythonTool(stateful=True, sandbox=sandbox, **QUICK)
    async with tool.episode() as (first,), tool.episode() as (second,):
        await first.invoke({"code": "x = 1\nopen('note', 'w').write('hi')"})
        await second.invoke({"code": "x = 2"})
        assert await first.invoke({"code": "x"}) == "1"
        assert await second.invoke({"code": "x"}) == "2"
        with pytest.raises(ToolRejected):
            await first.invoke({"code": "1 / 0"})
        assert await first.invoke({"code": "print(x, open('note').read())"}) == "1 hi"
    async with tool.episode() as (again,):
        with pytest.raises(ToolRejected, match="NameError"):
            await again.invoke({"code": "x"})
    await release_shared()


async def test_calls_of_one_turn_run_concurrently_where_they_share_no_state():
    async with python(wall_s=5.0) as tool:
        endless = asyncio.create_task(tool.invoke({"code": "while True: pass"}))
        await asyncio.sleep(0.1)
        assert await tool.invoke({"code": "1 + 1"}) == "2"
        assert not endless.done()
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless


async def test_with_state_a_broken_limit_ends_the_interpreter_and_the_next_call_gets_a_new_one():
    async with python(stateful=True, wall_s=0.4) as tool:
        await tool.invoke({"code": "x = 1"})
        with pytest.raises(ToolRejected, match="Its variables are gone"):
            await tool.invoke({"code": "while True: pass"})
        with pytest.raises(ToolRejected, match="NameError"):
            await tool.invoke({"code": "x"})


async def test_between_calls_nothing_of_a_session_runs():
    code = """
import threading, time
ticks = []
def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
time.sleep(0.1)
"""
    async with python(stateful=True) as tool:
        await tool.invoke({"code": code})
        await asyncio.sleep(0.5)
        gaps = "print(max(b - a for a, b in zip(ticks, ticks[1:] + [time.monotonic()])) > 0.4)"
        assert await tool.invoke({"code": gaps}) == "True"


async def test_packages_are_importable_with_their_requirements_and_nothing_else():
    async with python(packages=["numpy"], preload=["numpy.random"], memory_mb=256) as tool:
        assert (
            await tool.invoke({"code": "import numpy as np; print(np.ones((2, 2)) @ np.arange(2))"})
            == "[1. 1.]"
        )
        drawn = "import numpy as np; print(np.random.rand() == np.random.RandomState(0).rand())"
        assert await tool.invoke({"code": drawn}) == "True"
        with pytest.raises(ToolRejected, match="No module named 'pydantic'"):
            await tool.invoke({"code": "import pydantic"})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"packages": ["no-such-package"]}, "`no-such-package`, which is not installed"),
        ({"preload": ["no_such_module"]}, "cannot import early"),
        ({"wall_s": 0}, "wall_s above 0"),
        ({"output_bytes": 10**8}, "at most 8,388,608 bytes of output"),
        ({"sandbox": "jail"}, "no sandbox `jail`"),
    ],
)
async def test_a_wrong_setting_is_a_one_sentence_error(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        async with python(**settings):
            pass


class Numbers(ToolEnv):
    """Questions for Python."""

    limits = Limits(max_turns=4, max_tokens=None)
    tools = (PythonTool(**QUICK, stateful=True),)

    def tasks(self, split):
        first = 23 if split == "train" else 53
        numbers = range(first, first + 8)
        return [Task.ask(f"{split}{n}", f"Square {n}.", answer=str(n * n), n=n) for n in numbers]

    def reward(self, task: Task, answer: str) -> float:
        return float(answer == task.answer)

    def expert(self, task: Task) -> Script:
        return solve(task)


def solve(task):
    yield call("python", code=f"n = {task.metadata['n']}")
    squared = yield call("python", code="n * n")
    yield say(squared)


@pytest.mark.full
async def test_an_environment_with_it_passes_the_check():
    report = await check_env_async(Numbers, n=8)
    assert report.errors == ()


async def test_an_environment_plays_many_episodes_at_once():
    tasks = Numbers().tasks("train") * 4
    episodes = await asyncio.gather(*(play(Numbers(), ScriptedAgent(solve(task)), task) for task in tasks))
    assert [episode.step_rewards[-1] for episode in episodes] == [1.0] * 32
    assert {episode.events["tool/python/calls"] for episode in episodes} == {2}
    await release_shared()


async def test_the_models_failures_are_counted_by_kind_and_scored():
    def script():
        for code in ("1 / 0", "import os; os._exit(1)", "x = = 1"):
            yield call("python", code=code)

    episode = await play(Numbers(), ScriptedAgent(script()), Numbers().tasks("train")[0])
    assert episode.failure is None
    assert episode.events["tool/python/rejected/error"] == 2
    assert episode.events["tool/python/rejected/ended"] == 1
    await release_shared()


async def test_an_interpreter_of_an_environment_runs_its_setup_again_after_a_limit():
    tool = PythonTool(**{**QUICK, "sandbox": "namespaces", "wall_s": 0.5})
    try:
        async with tool.interpreter("x = [1]") as interpreter:
            assert not interpreter.has_state
            assert (await interpreter.run("x.append(2); x")).output == "[1, 2]\n"
            assert interpreter.has_state
            assert (await interpreter.run("import time; time.sleep(9)")).outcome == "timeout"
            assert not interpreter.has_state
            assert (await interpreter.run("x")).output == "[1]\n"
        assert not interpreter.has_state
        async with tool.interpreter("1 / 0") as broken:
            with pytest.raises(ToolError, match="setup of the interpreter: error ZeroDivisionError"):
                await broken.run("x")
            assert not broken.has_state
    finally:
        await release_shared()
