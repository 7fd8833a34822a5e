"""How late the event loop was, as the meter says it."""

from __future__ import annotations

import asyncio
import time

from agentrl.run.stages import LagMeter


async def test_a_stall_shows_once_and_a_quiet_loop_hardly_lags():
    async with LagMeter() as meter:
        await asyncio.sleep(0.05)
        meter.take()
        time.sleep(0.3)
        await asyncio.sleep(0.02)
        stalled = meter.take()
        await asyncio.sleep(0.05)
        quiet = meter.take()
    assert 0.28 <= stalled < 3.0
    assert quiet < stalled - 0.1


async def test_a_meter_leaves_no_task_behind():
    async with LagMeter():
        pass
    assert len(asyncio.all_tasks()) == 1
