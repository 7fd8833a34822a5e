"""The transports of weights to servers, and the files and groups that they leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports import bucket_files, shared_memory
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError
from agentrl.types import JSON
from agentrl.types.seams import Bucket, Sampling
from tests.engine.feeding import TIMEOUT_S, Rig, block_first, open_rig, transports
from tests.engine.scheduling import Layered, Scheduler, checkpoint
from tests.engine.serving import CONTROL, embedded_server, save_tiny
from tests.engine.subjects import VOCAB, delivery_of, logits_of, text_of, tiny


async def test_a_damaged_folder_is_loaded_by_no_server(tmp_path: Path) -> None:
    transport = transports(tmp_path)["disk"]
    async with open_rig(tmp_path / "shared", Scheduler(), transport=transport) as rig:
        await rig.send(1)
        for change in (lambda old: old[:-1] + bytes([old[-1] ^ 1]), lambda old: old[:-1]):
            (path,) = (tmp_path / "disk").glob("full-*/model.safetensors")
            path.write_bytes(change(path.read_bytes()))
            calls = len(rig.schedulers[0].calls)
            with pytest.raises(EngineError):
                await rig.sink.restore(rig.servers[0])
            assert rig.schedulers[0].calls[calls:] == ["/pause_generation"]
            await rig.sink.restore(rig.servers[0])
        await rig.expect_version(1)


async def test_a_folder_is_named_so_that_any_process_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths: list[str] = []
    scheduler = Scheduler(loader=False)
    scheduler.before = lambda path, body: paths.append(body.get("model_path", "/"))
    (tmp_path / "shared").mkdir()
    async with open_rig(tmp_path / "shared", scheduler, transport=Disk(Path("disk"))) as rig:
        await rig.send(1)
    assert all(Path(path).is_absolute() for path in paths)


async def test_folders_and_deltas_do_not_pile_up(tmp_path: Path) -> None:
    transport = transports(tmp_path)["delta"]
    async with open_rig(tmp_path / "shared", Scheduler(), transport=transport) as rig:
        kinds = []
        for version in range(1, 8):
            await rig.send(version)
            names = sorted(path.name for path in (tmp_path / "disk").iterdir())
            kinds.append("".join(name[0] for name in names))
            assert len(list((tmp_path / "mirror").iterdir())) <= 2
        assert kinds == ["f", "df", "ddf", "ff", "dff", "ddff", "ff"]


async def test_servers_without_our_loader_are_detected(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler(loader=False)) as rig:
        with pytest.raises(EngineError, match="custom-weight-loader"):
            await rig.send(1)
        assert rig.schedulers[0].calls == []
        assert rig.lost == []
    shared = tmp_path / "shared"
    shared.mkdir()
    disk = Disk(tmp_path / "disk", shared=shared)
    async with open_rig(shared, Scheduler(loader=False), transport=disk) as rig:
        await rig.send(1)
        await rig.expect_version(1)
    with pytest.raises(ConfigError, match="mirror"):
        Disk(tmp_path / "disk", full_every=2)


async def test_weights_that_do_not_fit_are_written_while_the_servers_are_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    write = bucket_files.write_bucket

    def full(path: Path, number: int, buckets: Sequence[Bucket]) -> JSON:
        held = sum(file.stat().st_size > 0 for file in tmp_path.glob("agentrl-weights-*"))
        if held > 1:
            raise EngineError(f"{tmp_path} is too full for a bucket")
        writes.append(held)
        return write(path, number, buckets)

    async with open_rig(tmp_path, Scheduler()) as rig:
        await rig.send(1)
        assert rig.schedulers[0].calls.count("/update_weights_from_tensor") == 1, "all files in one call"
        assert rig.sink.standstill_s > 0
        for module in (bucket_files, shared_memory):
            monkeypatch.setattr(module, "write_bucket", full)
        await rig.send(2)
        await rig.expect_version(2)
    assert len(writes) > 4


async def test_every_rank_reports_the_tensors_it_received(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler(tp_size=2)) as rig:
        await rig.send(1)
        await rig.expect_version(1)
        ranks = rig.schedulers[0]

        def damage(path: str, body: dict) -> None:
            for file in tmp_path.glob("agentrl-weights-*"):
                if path == "/update_weights_from_tensor" and (data := bytearray(file.read_bytes())):
                    data[0] ^= 1
                    file.write_bytes(data)
                    ranks.before = lambda path, body: None

        ranks.before = damage
        with pytest.raises(EngineError, match="arrived damaged in http"):
            await rig.send(2)
        await rig.expect_version(1)


@pytest.mark.parametrize(("sent_dtype", "server_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
async def test_weights_may_be_kept_in_another_dtype(
    tmp_path: Path, sent_dtype: str, server_dtype: str
) -> None:
    scheduler = Scheduler(Layered(getattr(torch, server_dtype)))
    async with open_rig(tmp_path, scheduler) as rig:
        tensors = checkpoint(1, getattr(torch, sent_dtype))
        await rig.send(1, tensors=tensors)
        assert scheduler.holds(1, getattr(torch, sent_dtype))

        load = scheduler.model.load_weights

        def damage(weights: Iterable[tuple[str, Tensor]]) -> None:
            load(weights)
            if scheduler.holds(2, getattr(torch, sent_dtype)):
                scheduler.model.layer.slice_of("k_proj.bias")[0] += 1

        scheduler.model.load_weights = damage
        with pytest.raises(EngineError, match=r"k_proj\.bias"):
            await rig.send(2, tensors=checkpoint(2, getattr(torch, sent_dtype)))
        assert scheduler.holds(1, getattr(torch, sent_dtype))


async def test_the_embedded_engine_takes_weights_over_http(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    async with embedded_server() as (url, engine):
        rig = Rig([], [url], Disk(tmp_path / "disk", model=model), headers=CONTROL)
        policy = SGLangPolicy(url, vocab_size=VOCAB, decode=text_of)
        for version in (1, 2):
            delivery = delivery_of(tiny("qwen3", version))
            async with rig.sink.begin(delivery.manifest, version) as transaction:
                for bucket in delivery.buckets:
                    await transaction.put(bucket)
                await transaction.commit(delivery.checksum)
            completion = await policy.generate([1, 2, 3], Sampling(8, temperature=0.0), session="a")
            rows = logits_of(tiny("qwen3", version), [1, 2, 3, *completion.token_ids.tolist()])[2:-1]
            assert rows.argmax(-1).tolist() == completion.token_ids.tolist()
            assert set(completion.versions.tolist()) == {version}
        unknown = [("other", torch.zeros(2))]
        with pytest.raises(EngineError):
            await rig.send(3, tensors=unknown)
        assert (engine.version, rig.lost, rig.sink.version) == (2, [], 2)
        np.testing.assert_array_equal(rig.servers[0].url, url)
        await policy.close()
        await rig.sink.close()
        await rig.servers[0].close()


async def test_the_group_is_reused_and_created_again_for_other_servers(tmp_path: Path) -> None:
    transport = Distributed(timeout_s=TIMEOUT_S, folder=tmp_path)
    async with open_rig(tmp_path, Scheduler(), Scheduler(), transport=transport) as rig:
        first, second = rig.schedulers
        await rig.send(1)
        await rig.send(2)
        assert first.calls.count("/init_weights_update_group") == 1
        # Restarted at the same address: it has neither the group nor the weights.
        second.groups.clear()
        second.version = "default"
        second.model = Layered()
        await rig.send(3)
        await rig.expect_version(3)
        rig.servers[1] = Server(rig.servers[1].url, timeout_s=TIMEOUT_S, update_timeout_s=TIMEOUT_S)
        await rig.send(4)
        await rig.expect_version(4)
        assert first.calls.count("/init_weights_update_group") == 3
    assert first.groups == second.groups == {}


@pytest.mark.parametrize("path", ["/update_weights_from_distributed", "/init_weights_update_group"])
async def test_a_group_in_which_one_does_not_come_ends_at_its_deadline(tmp_path: Path, path: str) -> None:
    transport = Distributed(timeout_s=0.5, folder=tmp_path)
    async with open_rig(tmp_path, Scheduler(), Scheduler(), transport=transport) as rig:
        await rig.send(1)
        first, second = rig.schedulers
        if path.startswith("/init"):
            # A group exists already; a restarted server needs another.
            second.version = "default"
        over = asyncio.Event()
        second.before = block_first(over, path)
        with pytest.raises(EngineUnavailableError):
            await rig.send(2)
        second.dead = "killed"
        over.set()
        # An update without an answer may take effect later, so that server must not serve; one without an
        # update may.
        assert rig.lost == ([rig.servers[1]] if path.startswith("/update") else [])
        assert first.holds(1)
        assert not first.paused


async def test_the_trainers_own_groups_are_not_used(tmp_path: Path) -> None:
    async with open_rig(
        tmp_path, Scheduler(), transport=Distributed(timeout_s=TIMEOUT_S, folder=tmp_path)
    ) as rig:
        await rig.send(1)
        assert not torch.distributed.is_initialized()
