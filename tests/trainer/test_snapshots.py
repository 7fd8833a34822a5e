"""A trainer hands servers a snapshot, and whoever has it in the end frees it."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.errors import EngineError
from agentrl.trainer.launch.inline import InlineRank
from agentrl.trainer.ranks import RankTrainer
from agentrl.weights.snapshot import LocalSnapshot
from tests.engine.feeding import block_first, open_rig
from tests.engine.scheduling import Layered, Scheduler
from tests.processes.test_ray_snapshots import BUCKET_BYTES, Versions, VersionsPlan


@pytest.fixture
def trainer():
    return RankTrainer(InlineRank(Versions()), VersionsPlan(), bucket_bytes=BUCKET_BYTES)


@pytest.fixture
def freed(monkeypatch):
    """The snapshots that were freed."""
    freed, free = [], LocalSnapshot.free
    monkeypatch.setattr(LocalSnapshot, "free", lambda self: freed.append(self) or free(self))
    return freed


async def test_a_snapshot_is_freed_after_the_next_version(tmp_path, trainer, freed):
    async with open_rig(tmp_path, Scheduler(), Scheduler()) as rig:
        await trainer.publish(rig.sink, version=1)
        assert freed == []
        await trainer.publish(rig.sink, version=2)
        assert len(freed) == 1
        assert not rig.sink.holds(freed[0])
        await rig.expect_version(2)
    assert len(freed) == len(set(freed)) == 2


async def test_one_that_is_refused_is_freed_and_the_version_before_serves(tmp_path, trainer, freed):
    async with open_rig(tmp_path, Scheduler()) as rig:
        await trainer.publish(rig.sink, version=1)
        broken = []

        def breaks(path, body):
            if path == "/update_weights_from_tensor" and not broken:
                broken.append(path)
                raise RuntimeError("no room")

        rig.schedulers[0].before = breaks
        with pytest.raises(EngineError):
            await trainer.publish(rig.sink, version=2)
        assert len(freed) == len(broken) == 1
        await trainer.publish(rig.sink, version=3)
        await rig.expect_version(3)


async def test_a_cancelled_publication_that_reached_its_end_keeps_its_snapshot(tmp_path, trainer, freed):
    """A server that is restarted later gets it."""
    async with open_rig(tmp_path, Scheduler()) as rig:
        await trainer.publish(rig.sink, version=1)
        goes_on = asyncio.Event()
        rig.schedulers[0].before = block_first(goes_on, "/update_weights_from_tensor")
        publishing = asyncio.create_task(trainer.publish(rig.sink, version=2))
        while rig.schedulers[0].calls.count("/update_weights_from_tensor") < 2:
            await asyncio.sleep(0.01)
        publishing.cancel()
        await asyncio.sleep(0.05)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert len(freed) == 1
        await rig.expect_version(2)
        rig.schedulers[0].model = Layered()
        await rig.sink.restore(rig.servers[0])
        await rig.expect_version(2)
