"""Weights that a rank on Ray keeps reach the servers from its process; the driver's has none of them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import signal
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import DivergedError, EngineError, TrainerError
from agentrl.trainer.launch.rank_snapshot import RankSnapshot
from agentrl.trainer.launch.shared_buffers import Filled
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.snapshots import called
from agentrl.types.seams import SnapshotSink
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, pack_buckets
from agentrl.weights.shared import BufferPool
from tests.engine.feeding import TIMEOUT_S, open_rig, transports
from tests.engine.scheduling import Layered, Scheduler, checkpoint
from tests.processes.ranks import ranks_on
from tests.processes.test_ray_ranks import await_end

BUCKET_BYTES = 100


class VersionsPlan:
    """A plan whose one rank publishes `checkpoint(1)`, `checkpoint(2)` and so on."""

    world_size = 1
    models: ClassVar = {"old": ""}

    @contextmanager
    def worker(self, place):
        yield Versions()


class Versions:
    def __init__(self):
        self.versions = count(1)
        self.pool = BufferPool(BUCKET_BYTES)
        self.breaks = False

    def manifest(self):
        return manifest_of(checkpoint(1))

    def adapters(self):
        return ()

    def weights(self, manifest, bucket_bytes, cast=None):
        assert cast is None
        tensors = checkpoint(next(self.versions))
        if self.breaks:
            tensors[0][1][0, 0] = float("nan")
        for bucket in pack_buckets(tensors, bucket_bytes):
            buffer = self.pool.take(len(bucket.data))
            buffer.bytes_B.numpy()[: len(bucket.data)] = bucket.data
            yield Filled(bucket.tensors, buffer, self.pool)
        return checksum(tensors)

    def diverge(self):
        self.breaks = True

    def wait_for(self, path):
        """As long as an update may take."""
        Path(path).with_suffix(".begun").touch()
        while not Path(path).exists():
            pass


@pytest.fixture
def ranks(session, placement, tmp_path):
    ranks = ranks_on(session, placement, 1, tmp_path / "ranks", preloaded=__name__)
    yield ranks
    ranks.close()
    await_end(ranks)


async def trainer_of(ranks):
    return await ranks.run(lambda: RankTrainer(ranks, VersionsPlan(), bucket_bytes=BUCKET_BYTES))


def buckets_mapped(pid: int | str) -> int:
    """How many buckets a process has in its memory."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:agentrl-bucket")


@pytest.mark.parametrize("kind", ["shared memory", "disk", "delta", "distributed"])
async def test_servers_get_the_weights_of_a_rank(ranks, tmp_path, monkeypatch, kind):
    copied: list[str] = []
    copy = RankSnapshot.buckets
    monkeypatch.setattr(RankSnapshot, "buckets", lambda self: copied.append(kind) or copy(self))
    trainer = await trainer_of(ranks)
    transport = transports(tmp_path)[kind]
    async with open_rig(tmp_path / "shared", Scheduler(), Scheduler(), transport=transport) as rig:
        assert isinstance(rig.sink, SnapshotSink)
        before = buckets_mapped("self")
        for version in range(1, 5):
            report = await trainer.publish(rig.sink, version=version)
            await rig.expect_version(version)
        assert report.num_bytes == sum(tensor.nbytes for _, tensor in checkpoint(1))
        assert rig.held == 4
        assert not rig.lost
        # Only a delta is made in this process, from both versions: it maps those of the last one.
        assert copied == ([kind] * 4 if kind == "delta" else [])
        num_buckets = len(list(pack_buckets(checkpoint(1), BUCKET_BYTES)))
        assert buckets_mapped("self") - before == (num_buckets if kind == "delta" else 0)
        # The rank keeps the last version, and fills the memory of those before again.
        (pid,) = ranks.pids
        assert 1 < buckets_mapped(pid) <= 3 * len(list(pack_buckets(checkpoint(1), BUCKET_BYTES)))


def files_of(body) -> list[str]:
    """The files of a request to the loader."""
    ((_, request),) = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
    return [path for path, _ in json.loads(request.numpy().tobytes())["files"]]


async def test_a_server_maps_the_memory_of_the_rank_itself(ranks, tmp_path):
    trainer = await trainer_of(ranks)
    (pid,) = ranks.pids
    async with open_rig(tmp_path, Scheduler(), transport=SharedMemory(tmp_path)) as rig:
        (server,), sent = rig.schedulers, []
        server.before = lambda path, body: (
            sent.append(files_of(body)) if path == "/update_weights_from_tensor" else None
        )
        for version in range(1, 4):
            await trainer.publish(rig.sink, version=version)
            await rig.expect_version(version)
        assert len(sent) == 3
        for files in sent:
            mapped = [file for file in files if file.startswith(f"/proc/{pid}/fd/")]
            # One bucket has an integer where it is not aligned: that one is copied.
            assert len(files) - 1 == len(mapped) > 1


async def test_a_server_without_access_to_the_memory_gets_copies_from_then_on(ranks, tmp_path, monkeypatch):
    def refuse(path, flags):
        raise PermissionError(f"{path} is no memory of a sender")

    monkeypatch.setattr(agentrl_sglang.tensors, "_open_bucket", refuse)
    trainer = await trainer_of(ranks)
    async with open_rig(tmp_path, Scheduler(), Scheduler(), transport=SharedMemory(tmp_path)) as rig:
        (server, _), calls = rig.schedulers, []
        server.before = lambda path, body: calls.append(path)
        for version in (1, 2):
            await trainer.publish(rig.sink, version=version)
            await rig.expect_version(version)
            calls.append("published")
        assert not rig.lost
    first, second = (calls[: calls.index("published")], calls[calls.index("published") + 1 :])
    assert first.count("/update_weights_from_tensor") > 2
    assert second.count("/update_weights_from_tensor") == 1, "all files in one call"


async def test_a_server_on_the_machine_gets_a_copy_from_a_rank_elsewhere(ranks, tmp_path, monkeypatch):
    trainer = await trainer_of(ranks)
    take = ranks.snapshot

    def elsewhere(*call):
        snapshot = take(*call)
        snapshot.is_here = False
        return snapshot

    monkeypatch.setattr(ranks, "snapshot", elsewhere)
    async with open_rig(tmp_path, Scheduler()) as rig:
        await trainer.publish(rig.sink, version=1)
        await rig.expect_version(1)
        await rig.sink.restore(rig.servers[0])
        await rig.expect_version(1)


async def test_a_restarted_server_gets_its_weights_while_the_rank_trains(ranks, tmp_path):
    trainer = await trainer_of(ranks)
    transport = Distributed(timeout_s=TIMEOUT_S, folder=tmp_path)
    async with open_rig(tmp_path, Scheduler(), transport=transport) as rig:
        await trainer.publish(rig.sink, version=1)
        training = asyncio.create_task(called(ranks, Versions.wait_for, str(tmp_path / "ranks" / "done")))
        while not (tmp_path / "ranks" / "done.begun").exists():
            await asyncio.sleep(0.02)
        (server,) = rig.schedulers
        server.groups.clear()
        server.version, server.model = "default", Layered()
        await rig.sink.restore(rig.servers[0])
        assert not training.done()
        await rig.expect_version(1)
        (tmp_path / "ranks" / "done").touch()
        await training


async def test_weights_that_are_not_finite_are_not_sent(ranks, tmp_path):
    trainer = await trainer_of(ranks)
    async with open_rig(tmp_path, Scheduler()) as rig:
        await trainer.publish(rig.sink, version=1)
        ranks.call(Versions.diverge)
        with pytest.raises(DivergedError, match=r"layer\.embed_tokens\.weight holds weights that are not"):
            await trainer.publish(rig.sink, version=2)
        await rig.expect_version(1)
        assert rig.held == 1


async def test_a_server_that_does_not_load_them_leaves_the_old_version(ranks, tmp_path):
    trainer = await trainer_of(ranks)
    transport = Distributed(timeout_s=TIMEOUT_S, folder=tmp_path)
    async with open_rig(tmp_path, Scheduler(), Scheduler(), transport=transport) as rig:
        await trainer.publish(rig.sink, version=1)
        refused = []

        def refuse(path, body):
            if path == "/update_weights_from_distributed" and not refused:
                refused.append(path)
                raise RuntimeError("no")

        rig.schedulers[1].before = refuse
        with pytest.raises(EngineError):
            await trainer.publish(rig.sink, version=2)
        assert refused
        assert rig.schedulers[0].holds(1)
        # The rank has freed what was not taken; version 3 is its next one.
        await trainer.publish(rig.sink, version=3)
        assert rig.schedulers[0].holds(3)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["shared memory", "distributed"])
async def test_a_rank_that_is_killed_in_mid_send_is_named_and_its_servers_are_reported(ranks, tmp_path, kind):
    trainer = await trainer_of(ranks)
    async with open_rig(
        tmp_path / "shared", Scheduler(), Scheduler(), transport=transports(tmp_path)[kind]
    ) as rig:
        await trainer.publish(rig.sink, version=1)
        (pid,) = ranks.pids
        loading = {
            "shared memory": "/update_weights_from_tensor",
            "distributed": "/update_weights_from_distributed",
        }[kind]
        struck = []

        def strike(path, body):
            if path == loading and not struck:
                struck.append(path)
                os.kill(pid, signal.SIGKILL)
                # Its memory is there as long as it is.
                while Path(f"/proc/{pid}").exists():
                    pass

        for scheduler in rig.schedulers:
            scheduler.before = strike
        with pytest.raises(TrainerError, match="rank 0 of the trainer"):
            await trainer.publish(rig.sink, version=2)
        # Whoever may have some of the new weights has to be restarted; nobody has the ones before.
        assert struck
        assert set(rig.lost) == set(rig.servers)
        assert all(scheduler.paused for scheduler in rig.schedulers)
        with pytest.raises(TrainerError, match=rf"rank 0 of the trainer \(process {pid} on .*was killed"):
            await called(ranks, Versions.manifest)


async def test_a_snapshot_is_the_weights_bit_for_bit_wherever_the_work_runs(ranks):
    await trainer_of(ranks)
    snapshot = await ranks.run(
        lambda: ranks.snapshot(Versions.weights, manifest_of(checkpoint(1)), BUCKET_BYTES)
    )
    (pid,) = ranks.pids
    expected = list(pack_buckets(checkpoint(1), BUCKET_BYTES))
    assert await snapshot.run(where) == (pid, [bucket.data.tobytes() for bucket in expected])
    assert [bucket.data.tobytes() for bucket in await snapshot.buckets()] == [
        bucket.data.tobytes() for bucket in expected
    ]
    assert tuple(map(tuple, snapshot.parts)) == tuple(bucket.tensors for bucket in expected)
    assert snapshot.checksum == checksum(checkpoint(1))


def where(buckets):
    return os.getpid(), [np.asarray(bucket.data).tobytes() for bucket in buckets]
