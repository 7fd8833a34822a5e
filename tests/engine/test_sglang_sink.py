"""Weights into servers: whole versions only, whatever breaks on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.sink import SGLangSink
from agentrl.engine.sglang.transports.base import Transport
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.engine.sglang.transports.inside import LOADER
from agentrl.engine.sglang.transports.shared_memory import SharedMemory
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError
from agentrl.protocols import Bucket, Sampling
from agentrl.weights import checksum, manifest_of, pack_buckets
from tests.engine.scheduling import Layered, Scheduler, checkpoint
from tests.engine.serving import embedded_server, save_tiny
from tests.engine.subjects import VOCAB, delivery_of, logits_of, text_of, tiny

Named = list[tuple[str, torch.Tensor]]
TIMEOUT_S = 5.0


class Rig:
    """Servers, and a sink that feeds them. held: how often the policy was held; lost: servers reported."""

    def __init__(self, schedulers: Sequence[Scheduler], urls: Sequence[str], transport: Transport) -> None:
        self.schedulers = list(schedulers)
        self.servers = [Server(url, timeout_s=TIMEOUT_S, update_timeout_s=TIMEOUT_S) for url in urls]
        self.held = 0
        self.lost: list[Server] = []
        self.sink = SGLangSink(transport, lambda: self.servers, self._hold, self._lose)

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        self.held += 1
        yield

    def _lose(self, server: Server, error: EngineError) -> None:
        assert str(error)
        self.lost.append(server)

    async def send(self, version: int, *, named: Named | None = None, damage: int = 0) -> None:
        named = checkpoint(version) if named is None else named
        async with self.sink.begin(manifest_of(named), version) as transaction:
            for bucket in pack_buckets(named, 100):
                await transaction.put(bucket)
            await transaction.commit(checksum(named) + damage)

    async def serve(self, version: int) -> None:
        """Check that every server serves exactly this version, and never served anything else by its name."""
        for scheduler, server in zip(self.schedulers, self.servers, strict=True):
            assert scheduler.holds(version)
            assert not scheduler.paused
            assert scheduler.dead is None
            assert await server.weight_version() == version
            assert all(name == str(seed) for name, seed in scheduler.served)


@asynccontextmanager
async def rig(folder: Path, *schedulers: Scheduler, transport: Transport | None = None) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(one.listening()) for one in schedulers]
        made = Rig(schedulers, urls, transport or SharedMemory(folder))
        async with asyncio.timeout(30):
            yield made
        await made.sink.close()
        for server in made.servers:
            await server.close()
        assert [path for path in folder.iterdir() if path.is_file()] == []


def holding(over: asyncio.Event, path: str) -> Callable[[str, dict], object]:
    """Keep the first call of a path waiting."""
    first = [over.wait]
    return lambda now, body: first.pop()() if now == path and first else None


def transports(folder: Path) -> dict[str, Transport]:
    (folder / "shared").mkdir(exist_ok=True)
    shared = folder / "shared"
    return {
        "shared memory": SharedMemory(shared),
        "disk": Disk(folder / "disk", shared=shared),
        "delta": Disk(folder / "disk", full_every=3, mirror=folder / "mirror", shared=shared),
        "distributed": Distributed(timeout_s=TIMEOUT_S, folder=shared),
    }


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


async def test_a_folder_that_broke_is_shown_to_no_server(tmp_path: Path) -> None:
    transport = transports(tmp_path)["disk"]
    async with rig(tmp_path / "shared", Scheduler(), transport=transport) as made:
        await made.send(1)
        for change in (lambda old: old[:-1] + bytes([old[-1] ^ 1]), lambda old: old[:-1]):
            (path,) = (tmp_path / "disk").glob("full-*/model.safetensors")
            path.write_bytes(change(path.read_bytes()))
            calls = len(made.schedulers[0].calls)
            with pytest.raises(EngineError):
                await made.sink.restore(made.servers[0])
            assert made.schedulers[0].calls[calls:] == ["/pause_generation"]
            await made.sink.restore(made.servers[0])
        await made.serve(1)


async def test_folders_and_deltas_do_not_pile_up(tmp_path: Path) -> None:
    transport = transports(tmp_path)["delta"]
    async with rig(tmp_path / "shared", Scheduler(), transport=transport) as made:
        kinds = []
        for version in range(1, 8):
            await made.send(version)
            names = sorted(path.name for path in (tmp_path / "disk").iterdir())
            kinds.append("".join(name[0] for name in names))
            assert len(list((tmp_path / "mirror").iterdir())) <= 2
        assert kinds == ["f", "df", "ddf", "ff", "dff", "ddff", "ff"]


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
        with pytest.raises(EngineError, match="holds other weights than version 2"):
            await made.send(2)
        await made.serve(1)
        assert made.lost == []
        other.before = lambda path, body: None
        await made.send(3)
        await made.serve(3)


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


async def test_a_server_without_our_loader_is_told_from_one_that_has_it(tmp_path: Path) -> None:
    async with rig(tmp_path, Scheduler(loader=False)) as made:
        with pytest.raises(EngineError, match="custom-weight-loader"):
            await made.send(1)
        assert made.schedulers[0].calls == []
        assert made.lost == []
    shared = tmp_path / "shared"
    shared.mkdir()
    disk = Disk(tmp_path / "disk", shared=shared)
    async with rig(shared, Scheduler(loader=False), transport=disk) as made:
        await made.send(1)
        await made.serve(1)
    with pytest.raises(ConfigError, match="mirror"):
        Disk(tmp_path / "disk", full_every=2)


async def test_every_rank_tells_what_arrived(tmp_path: Path) -> None:
    async with rig(tmp_path, Scheduler(tp_size=2)) as made:
        await made.send(1)
        await made.serve(1)


@pytest.mark.parametrize(("sent", "kept"), [("bfloat16", "float32"), ("float32", "bfloat16")])
async def test_weights_may_be_kept_in_another_dtype(tmp_path: Path, sent: str, kept: str) -> None:
    scheduler = Scheduler(Layered(getattr(torch, kept)))
    async with rig(tmp_path, scheduler) as made:
        named = checkpoint(1, getattr(torch, sent))
        await made.send(1, named=named)
        assert scheduler.holds(1, getattr(torch, sent))

        def damage(path: str, body: dict) -> None:
            if path == "/update_weights_from_tensor" and scheduler.holds(2, getattr(torch, sent)):
                scheduler.model.layer.place("k_proj.bias")[0] += 1

        scheduler.before = damage
        with pytest.raises(EngineError, match=r"k_proj\.bias"):
            await made.send(2, named=checkpoint(2, getattr(torch, sent)))
        assert scheduler.holds(1, getattr(torch, sent))


async def test_the_embedded_engine_takes_weights_over_http(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    async with embedded_server() as (url, engine):
        made = Rig([], [url], Disk(tmp_path / "disk", model=model))
        policy = SGLangPolicy(url, vocab_size=VOCAB, decode=text_of)
        for version in (1, 2):
            delivery = delivery_of(tiny("qwen3", version))
            async with made.sink.begin(delivery.manifest, version) as transaction:
                for bucket in delivery.buckets:
                    await transaction.put(bucket)
                await transaction.commit(delivery.checksum)
            got = await policy.generate([1, 2, 3], Sampling(8, temperature=0.0), session="a")
            rows = logits_of(tiny("qwen3", version), [1, 2, 3, *got.token_ids.tolist()])[2:-1]
            assert rows.argmax(-1).tolist() == got.token_ids.tolist()
            assert set(got.versions.tolist()) == {version}
        strange = [("other", torch.zeros(2))]
        with pytest.raises(EngineError):
            await made.send(3, named=strange)
        assert (engine.version, made.lost, made.sink.version) == (2, [], 2)
        np.testing.assert_array_equal(made.servers[0].url, url)
        await policy.close()
        await made.sink.close()
        await made.servers[0].close()


async def test_the_group_is_kept_and_made_anew_where_a_server_is_another(tmp_path: Path) -> None:
    transport = Distributed(timeout_s=TIMEOUT_S, folder=tmp_path)
    async with rig(tmp_path, Scheduler(), Scheduler(), transport=transport) as made:
        first, second = made.schedulers
        await made.send(1)
        await made.send(2)
        assert first.calls.count("/init_weights_update_group") == 1
        # Started again behind its address: it has neither the group nor the weights.
        second.groups.clear()
        second.version = "default"
        second.model = Layered()
        await made.send(3)
        await made.serve(3)
        made.servers[1] = Server(made.servers[1].url, timeout_s=TIMEOUT_S, update_timeout_s=TIMEOUT_S)
        await made.send(4)
        await made.serve(4)
        assert first.calls.count("/init_weights_update_group") == 3
    assert first.groups == second.groups == {}


@pytest.mark.parametrize("path", ["/update_weights_from_distributed", "/init_weights_update_group"])
async def test_a_group_in_which_one_does_not_come_ends_at_its_deadline(tmp_path: Path, path: str) -> None:
    transport = Distributed(timeout_s=1.0, folder=tmp_path)
    async with rig(tmp_path, Scheduler(), Scheduler(), transport=transport) as made:
        await made.send(1)
        first, second = made.schedulers
        if path.startswith("/init"):
            # There is a group already; a server that was started again needs another.
            second.version = "default"
        over = asyncio.Event()
        second.before = holding(over, path)
        with pytest.raises(EngineUnavailableError):
            await made.send(2)
        second.dead = "killed"
        over.set()
        # One that does not answer an update may do it later, so it may not serve; one that was not asked for
        # any may.
        assert made.lost == ([made.servers[1]] if path.startswith("/update") else [])
        assert first.holds(1)
        assert not first.paused


async def test_the_trainers_own_groups_are_left_alone(tmp_path: Path) -> None:
    async with rig(
        tmp_path, Scheduler(), transport=Distributed(timeout_s=TIMEOUT_S, folder=tmp_path)
    ) as made:
        await made.send(1)
        assert not torch.distributed.is_initialized()
