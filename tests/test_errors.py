"""Exceptions of user code become StageErrors of the innermost stage."""

from __future__ import annotations

import asyncio
import json
import sys
import sysconfig
import time

import pytest

from agentrl.errors import EnvCodeError, StageError, ToolRejected, UserError, did_you_mean
from agentrl.runtime.authorship import place_of
from agentrl.runtime.stage import EnvCode, stage
from agentrl.types import ToolCall
from tests.worlds import FOREVER_S


async def failure_of(body):
    with pytest.raises(StageError) as caught:
        await body
    return caught.value.stage, caught.value.kind


async def test_an_exception_is_an_error_of_the_stage_and_keeps_its_cause():
    async def broken():
        async with stage("reset", 1.0):
            raise KeyError("x")

    with pytest.raises(
        StageError, match=r"reset error: KeyError: 'x' \(test_errors.py, line \d+\)$"
    ) as caught:
        await broken()
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.stage, caught.value.kind) == ("reset", "error")


async def test_an_overrun_is_a_timeout_with_the_limit():
    async def slow():
        async with stage("step", 0.01):
            await asyncio.sleep(FOREVER_S)

    with pytest.raises(StageError, match=r"took longer than 0\.01 s") as caught:
        await slow()
    assert (caught.value.stage, caught.value.kind) == ("step", "timeout")


async def test_a_timeout_error_of_the_bodys_own_is_an_error_not_a_deadline():
    async def raises():
        async with stage("tool", 60.0):
            raise TimeoutError("the database did not answer")

    assert await failure_of(raises()) == ("tool", "error")


async def test_a_timeout_inside_without_any_deadline_outside_is_an_error():
    async def raises():
        async with stage("tool", None):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(FOREVER_S)

    assert await failure_of(raises()) == ("tool", "error")


@pytest.mark.parametrize(("outer_s", "inner_s", "expired"), [(60.0, 0.01, "tool"), (0.01, 60.0, "episode")])
async def test_the_error_names_the_stage_whose_deadline_expired(outer_s, inner_s, expired):
    async def nested():
        async with stage("episode", outer_s), stage("step", None), stage("tool", inner_s):
            await asyncio.sleep(FOREVER_S)

    assert await failure_of(nested()) == (expired, "timeout")


async def test_an_exception_belongs_to_the_innermost_stage():
    async def nested():
        async with stage("episode", 60.0), stage("step", 60.0), stage("tool", 60.0):
            raise ValueError

    assert await failure_of(nested()) == ("tool", "error")


async def test_a_stage_error_passes_through_unchanged():
    error = StageError("reward", "invalid", "nan")
    with pytest.raises(StageError) as caught:
        async with stage("step", 60.0):
            raise error
    assert caught.value is error


async def test_user_errors_pass_through():
    with pytest.raises(UserError, match="set the key"):
        async with stage("reset", 60.0):
            raise UserError("set the key")


async def test_a_tool_rejected_outside_of_a_tool_is_an_error():
    async def rejects():
        async with stage("reward", 60.0):
            raise ToolRejected("no")

    assert await failure_of(rejects()) == ("reward", "error")


async def test_cancellation_passes_through():
    running = asyncio.Event()

    async def body():
        async with stage("step", 60.0):
            running.set()
            await asyncio.sleep(FOREVER_S)

    task = asyncio.create_task(body())
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_body_in_time_raises_nothing():
    async with stage("step", 60.0):
        await asyncio.sleep(0)


def test_did_you_mean_names_the_nearest_or_nothing():
    assert did_you_mean("lerning_rate", ["learning_rate", "seed"]) == " Did you mean `learning_rate`?"
    assert did_you_mean("zzz", ["learning_rate", "seed"]) == ""
    ids = ["Maze-v0", "Wordle-v0", "TicTacToe-v0"]
    assert did_you_mean("wordl-v0", ids) == did_you_mean("Word-v7", ids) == " Did you mean `Wordle-v0`?"
    assert did_you_mean("XY-v0", ids) == ""


async def test_a_deadline_counts_from_the_beginning_of_its_block_whenever_the_block_first_waits():
    async def late():
        async with stage("step", 0.1):
            time.sleep(0.08)
            await asyncio.sleep(FOREVER_S)

    began = time.perf_counter()
    assert await failure_of(late()) == ("step", "timeout")
    assert time.perf_counter() - began < FOREVER_S


async def test_a_block_that_never_waits_leaves_no_timer_behind():
    for _ in range(100):
        async with stage("step", 1000.0):
            pass
    await asyncio.sleep(0)
    assert not asyncio.get_running_loop()._scheduled


async def test_a_deadline_that_strikes_in_an_inner_stage_leaves_no_cancellation_behind():
    async def inner():
        async with stage("episode", FOREVER_S), stage("step", 0.01):
            await asyncio.sleep(FOREVER_S)

    assert await failure_of(inner()) == ("step", "timeout")
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("timeout_s", [None, 60.0])
async def test_exit_is_an_error_of_the_stage(timeout_s):
    with pytest.raises(
        StageError, match="exit\\(\\) was called, SystemExit: 3; raise an exception"
    ) as caught:
        async with stage("step", timeout_s):
            sys.exit(3)
    assert (caught.value.stage, caught.value.kind) == ("step", "error")


async def test_ctrl_c_is_no_error_of_the_stage():
    with pytest.raises(KeyboardInterrupt):
        async with stage("step", None):
            raise KeyboardInterrupt


@pytest.mark.parametrize("raising", [lambda: {}["x"], lambda: json.loads("{"), lambda: ToolCall("f", None)])
def test_the_place_of_an_error_is_the_authors_line(raising):
    with pytest.raises((KeyError, ValueError)) as caught:
        raising()
    line = raising.__code__.co_firstlineno
    assert place_of(caught.value) == f"test_errors.py, line {line}"


def test_an_error_that_no_author_raised_has_no_place():
    assert place_of(KeyError("x")) == ""
    code = compile("{}['x']", sysconfig.get_path("purelib") + "/maze/env.py", "exec")
    with pytest.raises(KeyError) as caught:
        exec(code)
    inner = KeyError("x").with_traceback(caught.value.__traceback__.tb_next)
    assert place_of(inner) == "env.py, line 1"
    assert place_of(inner, installed=False) == ""


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), ValueError("two\nlines")])
def test_code_of_an_environment_fails_with_one_sentence(error):
    with pytest.raises(EnvCodeError) as caught, EnvCode("Maze-v0", "__init__", stage="make"):
        raise error
    sentence = str(caught.value)
    assert sentence.startswith("Maze-v0: `__init__` failed in test_errors.py, line ")
    assert type(error).__name__ in sentence
    assert sentence.endswith("; mend it.")
    assert "\n" not in sentence
    assert (caught.value.stage, caught.value.detail) == ("make", sentence)
    assert isinstance(caught.value, UserError)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [UserError("set the key"), ModuleNotFoundError("torch"), KeyboardInterrupt()]
)
def test_what_has_a_sentence_of_its_own_passes_through(error):
    with pytest.raises(type(error)) as caught, EnvCode("Maze-v0", "tasks"):
        raise error
    assert caught.value is error
