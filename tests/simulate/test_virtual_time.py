"""The loop of virtual time: order, jumps, timeouts, cancellation, and a stall."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_simulate.virtual_time import StalledError, VirtualTimeLoop, now_s, run_in_virtual_time


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_sleepers_wake_in_the_order_of_their_times_and_at_these_times(waits):
    woken = []

    async def sleeper(number, wait_s):
        nonlocal woken
        await asyncio.sleep(wait_s)
        woken.append((wait_s, number))
        assert now_s() == pytest.approx(wait_s, abs=1e-6)

    async def program():
        await asyncio.gather(*(sleeper(*each) for each in enumerate(waits)))

    run_in_virtual_time(program())
    assert [wait_s for wait_s, _ in woken] == sorted(waits)
    again, woken = woken, []
    run_in_virtual_time(program())
    assert woken == again


def test_a_year_takes_no_time():
    async def program():
        await asyncio.sleep(365 * 86400)
        return now_s()

    assert run_in_virtual_time(program()) == pytest.approx(365 * 86400)


def test_a_timeout_ends_a_wait_at_its_time_and_not_earlier():
    async def program():
        async with asyncio.timeout(5):
            await asyncio.sleep(4)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.sleep(100)
        return now_s()

    assert run_in_virtual_time(program()) == pytest.approx(7)


def test_a_cancelled_sleeper_cleans_up_and_its_time_does_not_pass():
    cleaned = []

    async def sleeper():
        try:
            await asyncio.sleep(1000)
        finally:
            cleaned.append(now_s())

    async def program():
        task = asyncio.create_task(sleeper())
        await asyncio.sleep(2)
        task.cancel()
        await asyncio.wait([task])
        return now_s()

    assert run_in_virtual_time(program()) == pytest.approx(2)
    assert cleaned == [pytest.approx(2)]


def test_what_the_program_leaves_behind_is_cancelled():
    ended = []

    async def forever():
        try:
            while True:
                await asyncio.sleep(1)
        finally:
            ended.append(True)

    async def program():
        program.task = asyncio.create_task(forever())
        await asyncio.sleep(10)

    run_in_virtual_time(program())
    assert ended == [True]


def test_a_wait_that_nothing_ends_is_an_error_and_no_hang():
    async def program():
        await asyncio.Event().wait()

    with pytest.raises(StalledError, match="nothing in it does"):
        run_in_virtual_time(program())


def test_its_time_begins_at_zero():
    loop = VirtualTimeLoop()
    assert loop.time() == 0
    loop.close()
