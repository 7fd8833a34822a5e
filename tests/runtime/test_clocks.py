"""Clocks of stages count the work itself: waits, restarts and pauses of the process stop them."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentrl.errors import StageError
from agentrl.runtime.clocks import Waits, clocks_stopped
from agentrl.runtime.gate import Gate
from agentrl.runtime.stage import stage
from tests.worlds import FOREVER_S


async def test_a_stopped_clock_does_not_count_and_goes_on_afterwards():
    running = stage("step", 0.2)

    async def work():
        async with running:
            await asyncio.sleep(0.05)
            with clocks_stopped():
                await asyncio.sleep(0.4)
            await asyncio.sleep(FOREVER_S)

    began = time.perf_counter()
    with pytest.raises(StageError, match=r"step timeout: took longer than 0\.2 s"):
        await work()
    assert 0.59 <= time.perf_counter() - began < FOREVER_S
    assert 0.19 < running.seconds < 0.5


async def test_every_stage_around_is_stopped_and_one_inside_has_a_clock_of_its_own():
    async def call():
        with clocks_stopped():
            async with stage("tool", 0.3):
                with clocks_stopped():
                    await asyncio.sleep(0.2)
                await asyncio.sleep(FOREVER_S)

    async with stage("episode", 0.2), stage("step", 0.2):
        with pytest.raises(StageError, match="tool timeout"):
            await call()


async def test_a_wait_for_a_slot_stops_the_clocks_and_holding_one_does_not():
    gate = Gate(1)

    async def hold(seconds):
        async with stage("step", 0.2), gate.admitted():
            await asyncio.sleep(seconds)

    await asyncio.gather(*(hold(0.05) for _ in range(8)))
    with pytest.raises(StageError, match="step timeout"):
        await hold(FOREVER_S)
    await hold(0.0)


async def test_a_pause_of_the_event_loop_is_not_counted():
    async def work():
        async with stage("tool", 0.7):
            for _ in range(3):
                await asyncio.sleep(0.1)

    # A loop that is blocked and a process that is suspended look the same.
    asyncio.get_running_loop().call_later(0.05, time.sleep, 0.75)
    await work()


async def test_a_stage_still_has_a_deadline_after_a_pause():
    async def hang():
        async with stage("tool", 0.4):
            await asyncio.sleep(FOREVER_S)

    asyncio.get_running_loop().call_later(0.05, time.sleep, 0.9)
    began = time.perf_counter()
    with pytest.raises(StageError, match="tool timeout"):
        await hang()
    assert 1.0 < time.perf_counter() - began < FOREVER_S


async def test_a_thread_with_a_loop_of_its_own_stops_no_clock_of_this_one():
    async def inside():
        with clocks_stopped():
            await asyncio.sleep(0.3)

    async def call():
        async with stage("tool", 0.1):
            await asyncio.to_thread(asyncio.run, inside())

    with pytest.raises(StageError, match="tool timeout"):
        await call()


async def test_a_child_task_that_outlives_its_stage_stops_and_resumes_nothing():
    async def late():
        with clocks_stopped():
            await asyncio.sleep(0.02)
        with clocks_stopped():
            await asyncio.sleep(0)

    errors = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    async with stage("step", 0.2):
        child = asyncio.create_task(late())
        await asyncio.sleep(0)
    await child
    await asyncio.sleep(0.2)
    assert errors == []


async def test_several_tasks_of_a_stage_stop_its_clock_together():
    async def wait(seconds):
        with clocks_stopped():
            await asyncio.sleep(seconds)

    running = stage("step", 0.3)
    async with running:
        await asyncio.gather(wait(0.1), wait(0.4))
    assert running.seconds < 0.3


async def test_what_waits_for_something_that_is_away_is_not_in_its_time():
    waits, there, running = Waits(), asyncio.Event(), stage("episode", 0.3)

    async def waiting():
        async with running:
            with waits.entered():
                await there.wait()

    task = asyncio.create_task(waiting())
    await asyncio.sleep(0)
    waits.leave()
    # A wait that begins meanwhile is stopped at once.
    late = stage("step", 0.3)

    async def waiting_late():
        async with late:
            with waits.entered():
                await there.wait()

    late_task = asyncio.create_task(waiting_late())
    await asyncio.sleep(0.6)
    waits.come_back()
    await asyncio.sleep(0.05)
    there.set()
    await asyncio.gather(task, late_task)
    assert 0.04 < running.seconds < 0.3
    assert 0.04 < late.seconds < 0.3

    async def slow():
        async with stage("step", 0.1):
            with waits.entered():
                await asyncio.sleep(FOREVER_S)

    with pytest.raises(StageError, match="timeout"):
        await slow()
