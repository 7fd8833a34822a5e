"""Weights into servers: whole versions only, whatever breaks on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports import Delivery, Loaded
from agentrl.engine.sglang.transports.inside import LOADER
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import EngineError, EngineUnavailableError
from agentrl.protocols import Bucket
from agentrl.weights import checksum, manifest_of, pack_buckets
from tests.engine.feeding import TIMEOUT_S, Damaging, holding, rig, transports
from tests.engine.scheduling import Scheduler, checkpoint


@pytest.mark.parametrize("kind", ["shared memory", "disk", "delta", "distributed"])
async def test_versions_follow_one_another_on_every_server(tmp_path: Path, kind: str) -> None:
    transport = transports(tmp_path)[kind]
    async with rig(tmp_path / "shared", Scheduler(), Scheduler(), transport=transport) as made:
        for version in range(1, 6):
            await made.send(version)
            await made.serve(version)
            assert made.sink.version == version
        assert (made.held, made.lost) == (5, [])
        for scheduler in made.schedulers:
            assert [name for name, _ in scheduler.served] == list("12345")
            order = [call for call in scheduler.calls if "_weights_" not in call]
            each = ["/pause_generation", "/flush_cache", "/update_weight_version", "/continue_generation"]
            assert order == each * 5


@pytest.mark.parametrize("kind", ["shared memory", "disk", "delta", "distributed"])
async def test_what_a_server_holds_is_compared_with_what_the_trainer_has(tmp_path: Path, kind: str) -> None:
    transport = transports(tmp_path)[kind]
    async with rig(tmp_path / "shared", Scheduler(), Scheduler(), transport=transport) as made:
        await made.send(1)
        other = made.schedulers[1]

        def damage(path: str, body: dict) -> None:
            if body.get("load_format") == LOADER and other.holds(2):
                other.model.layer.place("up_proj.weight")[0, 0] += 1

        other.before = damage
        with pytest.raises(EngineError, match=r"holds another layer\.up_proj\.weight than was sent"):
            await made.send(2)
        await made.serve(1)
        assert made.lost == []
        other.before = lambda path, body: None
        await made.send(3)
        await made.serve(3)


@pytest.mark.parametrize("kind", ["shared memory", "disk", "delta", "distributed"])
async def test_what_is_sent_is_compared_with_what_the_trainer_has(tmp_path: Path, kind: str) -> None:
    armed: list[bool] = []
    transport = Damaging(transports(tmp_path)[kind], armed)
    async with rig(tmp_path / "shared", Scheduler(), transport=transport) as made:
        await made.send(1)
        armed.append(True)
        with pytest.raises(EngineError):
            await made.send(2)
        await made.serve(1)
        await made.send(3)
        await made.serve(3)


class Doubting(SharedMemory):
    """Version 2 arrives with another checksum than the trainer has."""

    async def send(self, servers: Sequence[Server], delivery: Delivery) -> Mapping[Server, Loaded]:
        loaded = await super().send(servers, delivery)
        changed = delivery.version == 2
        return {server: Loaded(delivery.checksum + changed, one.unread) for server, one in loaded.items()}


async def test_a_checksum_that_a_server_tells_is_compared(tmp_path: Path) -> None:
    async with rig(tmp_path, Scheduler(), transport=Doubting(tmp_path)) as made:
        await made.send(1)
        with pytest.raises(EngineError, match="holds other weights than version 2 has"):
            await made.send(2)
        await made.serve(1)


async def test_a_server_that_cannot_go_back_is_lost_and_serves_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, Scheduler(), Scheduler()) as made:
        await made.send(1)
        broken = made.schedulers[0]

        def die(path: str, body: dict) -> None:
            if path == "/update_weights_from_tensor":
                broken.dead = "killed"

        broken.before = die
        with pytest.raises(EngineError):
            await made.send(2)
        assert made.lost == [made.servers[0]]
        assert broken.paused
        del made.schedulers[0], made.servers[0]
        await made.serve(1)


async def test_the_first_weights_have_none_before_them(tmp_path: Path) -> None:
    async with rig(tmp_path, Scheduler(), Scheduler()) as made:
        await made.sink.restore(made.servers[0])
        assert made.schedulers[0].calls == []

        def refuse(path: str, body: dict) -> None:
            if path == "/update_weights_from_tensor":
                raise RuntimeError("no")

        made.schedulers[0].before = refuse
        with pytest.raises(EngineError):
            await made.send(1)
        # Both may hold a part of the new weights, and nobody has a copy of what they had.
        assert made.lost == made.servers
        assert all(scheduler.paused for scheduler in made.schedulers)
        assert made.sink.version == 0


async def test_a_server_that_is_not_there_is_reported_before_anything_is_touched(tmp_path: Path) -> None:
    async with rig(tmp_path, Scheduler(), Scheduler()) as made:
        await made.send(1)
        made.servers[1] = Server("http://127.0.0.1:1", timeout_s=TIMEOUT_S)
        calls = len(made.schedulers[0].calls)
        with pytest.raises(EngineUnavailableError):
            await made.send(2)
        assert made.lost == [made.servers[1]]
        assert (len(made.schedulers[0].calls), made.held) == (calls, 1)
        del made.schedulers[1], made.servers[1]
        await made.serve(1)
        del made.schedulers[0], made.servers[0]
        with pytest.raises(EngineUnavailableError, match="no server takes weights"):
            await made.send(2)


async def test_a_server_that_hangs_ends_at_its_deadline(tmp_path: Path) -> None:
    async with rig(tmp_path, Scheduler(), Scheduler()) as made:
        await made.send(1)
        url = made.servers[0].url
        for path in ("/pause_generation", "/update_weights_from_tensor", "/flush_cache"):
            made.lost.clear()
            made.servers[0] = Server(url, timeout_s=0.2, update_timeout_s=0.2)
            over = asyncio.Event()
            made.schedulers[0].before = holding(over, path)
            with pytest.raises(EngineUnavailableError, match="did not"):
                await made.send(2)
            # It may do later what it did not answer. A flush does no harm.
            assert made.lost == ([] if path == "/flush_cache" else [made.servers[0]])
            assert made.schedulers[0].paused == (path == "/update_weights_from_tensor")
            assert made.schedulers[1].holds(1)
            assert not made.schedulers[1].paused
            over.set()


async def test_a_new_server_gets_the_current_weights(tmp_path: Path) -> None:
    fresh = Scheduler()
    async with rig(tmp_path, Scheduler(), fresh) as made:
        server = made.servers.pop()
        await made.send(1)
        await made.send(2)
        assert fresh.calls == []
        await made.sink.restore(server)
        made.servers.append(server)
        await made.serve(2)
        assert made.held == 2


async def test_what_arrives_wrong_touches_no_server(tmp_path: Path) -> None:
    async with rig(tmp_path, Scheduler()) as made:
        await made.send(1)
        calls = len(made.schedulers[0].calls)
        named = checkpoint(2)
        (bucket,) = pack_buckets(named, 1 << 20)
        manifest = manifest_of(named)
        with pytest.raises(EngineError, match="arrived damaged"):
            await made.send(2, damage=1)
        async with made.sink.begin(manifest, 2) as transaction:
            with pytest.raises(EngineError, match="cannot be read"):
                await transaction.put(Bucket(bucket.tensors, bucket.data[:-1]))
        async with made.sink.begin(manifest, 2) as transaction:
            await transaction.put(bucket)
            with pytest.raises(EngineError, match="came twice"):
                await transaction.put(bucket)
        async with made.sink.begin(manifest, 2) as transaction:
            with pytest.raises(EngineError, match="did not arrive"):
                await transaction.commit(checksum(named))
        for strange in (manifest[1:], (*manifest, manifest[0]), (), (manifest[0]._replace(dtype="float33"),)):
            with pytest.raises(EngineError):
                await made.sink.begin(strange, 2).__aenter__()
        with pytest.raises(EngineError, match="digits"):
            await made.sink.begin(manifest, -1).__aenter__()
        assert len(made.schedulers[0].calls) == calls
        await made.serve(1)


async def test_a_cancelled_update_is_brought_to_its_end(tmp_path: Path) -> None:
    async with rig(tmp_path, Scheduler()) as made:
        await made.send(1)
        reached = asyncio.Event()

        async def slowly() -> None:
            reached.set()
            await asyncio.sleep(0.05)

        made.schedulers[0].before = lambda path, body: slowly() if "tensor" in path else None
        task = asyncio.create_task(made.send(2))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await made.serve(2)
