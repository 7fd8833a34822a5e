"""Rewards of a final answer: any finite number or named numbers, with a deadline, off the event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from agentrl import Limits, say
from agentrl.errors import StageError
from agentrl.tools import inline
from tests.worlds import ASK, FOREVER_S, Parrot


async def started(env):
    await env.reset(ASK, seed=0)
    return env


@pytest.mark.parametrize("number", [1, 1.0, True, np.float32(1), np.float64(1), np.int64(1)])
async def test_a_reward_may_be_any_real_number(number):
    class Gives(Parrot):
        def reward(self, task, answer):
            return number

    reward = (await (await started(Gives())).step(say("x"))).reward
    assert reward == 1.0
    assert type(reward) is float


async def test_a_reward_may_be_async():
    class Judged(Parrot):
        async def reward(self, task, answer):
            await asyncio.sleep(0)
            return 0.25

    assert (await (await started(Judged())).step(say("x"))).reward == 0.25


@pytest.mark.parametrize("reward", [None, "1.0", float("nan"), float("-inf"), [1.0]])
async def test_a_reward_that_is_no_finite_number_is_named(reward):
    class Odd(Parrot):
        def reward(self, task, answer):
            return reward

    env = await started(Odd())
    with pytest.raises(StageError, match="return a finite number") as caught:
        await env.step(say("x"))
    assert (caught.value.stage, caught.value.kind) == ("reward", "invalid")
    assert repr(reward) in caught.value.detail


async def test_a_reward_in_parts_is_their_sum_and_keeps_them():
    class Parted(Parrot):
        def reward(self, task, answer):
            return {"right": float(answer == task.answer), "short": 0.25}

    reward = (await (await started(Parted())).step(say("3"))).reward
    assert reward == 1.25
    assert reward.parts == {"right": 1.0, "short": 0.25}


@pytest.mark.parametrize("part", [{"total": None}, {"total": "1"}, {"a": 1.0, "b": float("nan")}])
async def test_a_part_that_is_no_finite_number_is_named(part):
    class Odd(Parrot):
        def reward(self, task, answer):
            return part

    env = await started(Odd())
    with pytest.raises(StageError, match=f"the part `{list(part)[-1]}` of the reward is") as caught:
        await env.step(say("x"))
    assert (caught.value.stage, caught.value.kind) == ("reward", "invalid")


@pytest.mark.parametrize("quick", [True, False])
async def test_only_an_inline_reward_runs_on_the_event_loop(quick):
    class Where(Parrot):
        def reward(self, task, answer):
            return threading.current_thread() is threading.main_thread()

    class Quick(Where):
        @inline
        def reward(self, task, answer):
            return super().reward(task, answer)

    step = await (await started(Quick() if quick else Where())).step(say("x"))
    assert step.reward == quick


async def test_a_reward_that_breaks_is_a_failure_of_the_reward():
    class Broken(Parrot):
        def reward(self, task, answer):
            return 1 / 0

    env = await started(Broken())
    with pytest.raises(StageError, match="ZeroDivisionError") as caught:
        await env.step(say("x"))
    assert caught.value.stage == "reward"


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_reward_that_overruns_is_a_failure_of_the_reward(kind):
    class Slow(Parrot):
        limits = Limits(reward_timeout_s=0.02)

        async def reward(self, task, answer):
            await asyncio.sleep(FOREVER_S)
            return 1.0

    class Blocking(Slow):
        def reward(self, task, answer):
            time.sleep(0.3)
            return 1.0

    env = await started(Slow() if kind == "async" else Blocking())
    began = time.perf_counter()
    with pytest.raises(StageError) as caught:
        await env.step(say("x"))
    assert time.perf_counter() - began < 0.25
    assert (caught.value.stage, caught.value.kind) == ("reward", "timeout")
