"""The weight sink of servers: each serves a complete version, whatever fails in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports import Delivery, Loaded
from agentrl.engine.sglang.transports.inside import LOADER
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.types.seams import Bucket
from agentrl.weights.checksum import checksum
from agentrl.weights.codec import manifest_of, pack_buckets
from tests.engine.feeding import TIMEOUT_S, Damaging, block_first, open_rig, transports
from tests.engine.scheduling import Scheduler, checkpoint


@pytest.mark.parametrize("kind", ["cuda ipc", "shared memory", "disk", "delta", "distributed"])
async def test_versions_follow_one_another_on_every_server(tmp_path: Path, kind: str) -> None:
    transport = transports(tmp_path)[kind]
    async with open_rig(tmp_path / "shared", Scheduler(), Scheduler(), transport=transport) as rig:
        for version in range(1, 6):
            await rig.send(version)
            await rig.expect_version(version)
            assert rig.sink.version == version
        assert (rig.held, rig.lost) == (5, [])
        for scheduler in rig.schedulers:
            assert [name for name, _ in scheduler.served] == list("12345")
            order = [call for call in scheduler.calls if "_weights_" not in call]
            assert order == ["/pause_generation", "/update_weight_version", "/continue_generation"] * 5


@pytest.mark.parametrize("kind", ["cuda ipc", "shared memory", "disk", "delta", "distributed"])
async def test_what_a_server_holds_is_compared_with_what_the_trainer_has(tmp_path: Path, kind: str) -> None:
    transport = transports(tmp_path)[kind]
    async with open_rig(tmp_path / "shared", Scheduler(), Scheduler(), transport=transport) as rig:
        await rig.send(1)
        first, other = rig.schedulers

        load = other.model.load_weights

        def damage(weights: Iterable[tuple[str, Tensor]]) -> None:
            load(weights)
            if other.holds(2):
                other.model.layer.slice_of("up_proj.weight")[0, 0] += 1

        async def load_slowly(path: str, body: dict) -> None:
            if body.get("load_format") == LOADER:
                await asyncio.sleep(0.1)

        # A model that has moved is loaded as at first, and not by the copies that were recorded then.
        moved = other.model.layer.embed_tokens.weight
        moved.data = moved.data.clone()
        # The failure is known while the other server is still being read.
        first.before, other.model.load_weights = load_slowly, damage
        with pytest.raises(EngineError, match=r"holds another layer\.up_proj\.weight than was sent"):
            await rig.send(2)
        await rig.expect_version(1)
        assert rig.lost == []
        first.before, other.model.load_weights = lambda path, body: None, load
        await rig.send(3)
        await rig.expect_version(3)


@pytest.mark.parametrize("kind", ["cuda ipc", "shared memory", "disk", "delta", "distributed"])
async def test_what_is_sent_is_compared_with_what_the_trainer_has(tmp_path: Path, kind: str) -> None:
    armed: list[bool] = []
    transport = Damaging(transports(tmp_path)[kind], armed)
    async with open_rig(tmp_path / "shared", Scheduler(), transport=transport) as rig:
        await rig.send(1)
        armed.append(True)
        with pytest.raises(EngineError):
            await rig.send(2)
        await rig.expect_version(1)
        await rig.send(3)
        await rig.expect_version(3)


class WrongChecksum(SharedMemory):
    """Reports another checksum for version 2 than the trainer's."""

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        loaded = await super().send(servers, delivery)
        changed = delivery.version == 2
        return {
            server: Loaded(delivery.checksum + changed, result.unread) for server, result in loaded.items()
        }


async def test_a_checksum_that_a_server_reports_is_compared(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler(), transport=WrongChecksum(tmp_path)) as rig:
        await rig.send(1)
        with pytest.raises(EngineError, match="holds other weights than version 2 has"):
            await rig.send(2)
        await rig.expect_version(1)


async def test_a_server_that_fails_to_roll_back_is_reported_and_stays_paused(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler(), Scheduler()) as rig:
        await rig.send(1)
        broken = rig.schedulers[0]

        def die(path: str, body: dict) -> None:
            if path == "/update_weights_from_tensor":
                broken.dead = "killed"

        broken.before = die
        with pytest.raises(EngineError):
            await rig.send(2)
        assert rig.lost == [rig.servers[0]]
        assert broken.paused
        del rig.schedulers[0], rig.servers[0]
        await rig.expect_version(1)


async def test_a_failed_first_version_has_no_previous_one(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler(), Scheduler()) as rig:
        await rig.sink.restore(rig.servers[0])
        assert rig.schedulers[0].calls == []

        def refuse(path: str, body: dict) -> None:
            if path == "/update_weights_from_tensor":
                raise RuntimeError("no")

        rig.schedulers[0].before = refuse
        with pytest.raises(EngineError):
            await rig.send(1)
        # Both may hold a part of the new weights, and no copy of the previous ones exists.
        assert rig.lost == rig.servers
        assert all(scheduler.paused for scheduler in rig.schedulers)
        assert rig.sink.version == 0


async def test_a_server_that_is_not_there_is_reported_before_anything_is_touched(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler(), Scheduler()) as rig:
        await rig.send(1)
        rig.servers[1] = Server("http://127.0.0.1:1", timeout_s=TIMEOUT_S)
        calls = len(rig.schedulers[0].calls)
        with pytest.raises(EngineUnavailableError):
            await rig.send(2)
        assert rig.lost == [rig.servers[1]]
        assert (len(rig.schedulers[0].calls), rig.held) == (calls, 1)
        del rig.schedulers[1], rig.servers[1]
        await rig.expect_version(1)
        del rig.schedulers[0], rig.servers[0]
        with pytest.raises(EngineUnavailableError, match="no server takes weights"):
            await rig.send(2)


async def test_a_server_that_hangs_ends_at_its_deadline(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler(), Scheduler()) as rig:
        await rig.send(1)
        url = rig.servers[0].url
        for path in ("/pause_generation", "/update_weights_from_tensor", "/update_weight_version"):
            rig.lost.clear()
            rig.servers[0] = Server(url, timeout_s=0.2, update_timeout_s=0.2)
            over = asyncio.Event()
            rig.schedulers[0].before = block_first(over, path)
            with pytest.raises(EngineUnavailableError, match="did not"):
                await rig.send(2)
            # An unanswered call may still take effect later.
            assert rig.lost == [rig.servers[0]]
            assert rig.schedulers[0].paused == (path != "/pause_generation")
            assert rig.schedulers[1].holds(1)
            assert not rig.schedulers[1].paused
            over.set()


async def test_a_new_server_gets_the_current_weights(tmp_path: Path) -> None:
    fresh = Scheduler()
    async with open_rig(tmp_path, Scheduler(), fresh) as rig:
        server = rig.servers.pop()
        await rig.send(1)
        await rig.send(2)
        assert fresh.calls == []
        await rig.sink.restore(server)
        rig.servers.append(server)
        await rig.expect_version(2)
        assert rig.held == 2


async def test_a_wrong_manifest_or_checksum_reaches_no_server(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler()) as rig:
        await rig.send(1)
        calls = len(rig.schedulers[0].calls)
        tensors = checkpoint(2)
        (bucket,) = pack_buckets(tensors, 1 << 20)
        manifest = manifest_of(tensors)
        with pytest.raises(EngineError, match="arrived damaged"):
            await rig.send(2, damage=1)
        async with rig.sink.begin(manifest, 2) as transaction:
            with pytest.raises(EngineError, match="cannot be read"):
                await transaction.put(Bucket(bucket.tensors, bucket.data[:-1]))
        async with rig.sink.begin(manifest, 2) as transaction:
            await transaction.put(bucket)
            with pytest.raises(EngineError, match="came twice"):
                await transaction.put(bucket)
        async with rig.sink.begin(manifest, 2) as transaction:
            with pytest.raises(EngineError, match="did not arrive"):
                await transaction.commit(checksum(tensors))
        for wrong in (manifest[1:], (*manifest, manifest[0]), (), (manifest[0]._replace(dtype="float33"),)):
            with pytest.raises(EngineError):
                await rig.sink.begin(wrong, 2).__aenter__()
        with pytest.raises(EngineError, match="digits"):
            await rig.sink.begin(manifest, -1).__aenter__()
        assert len(rig.schedulers[0].calls) == calls
        await rig.expect_version(1)


async def test_a_cancelled_update_is_brought_to_its_end(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler()) as rig:
        await rig.send(1)
        reached = asyncio.Event()

        async def slowly() -> None:
            reached.set()
            await asyncio.sleep(0.05)

        rig.schedulers[0].before = lambda path, body: slowly() if "tensor" in path else None
        task = asyncio.create_task(rig.send(2))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.expect_version(2)
