"""The ways of weights into servers, and what each leaves behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import Server
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.engine.sglang.transports.distributed import Distributed
from agentrl.errors import ConfigError, EngineError, EngineUnavailableError
from agentrl.protocols import Sampling
from tests.engine.feeding import TIMEOUT_S, Rig, holding, rig, transports
from tests.engine.scheduling import Layered, Scheduler, checkpoint
from tests.engine.serving import embedded_server, save_tiny
from tests.engine.subjects import VOCAB, delivery_of, logits_of, text_of, tiny


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


async def test_a_folder_is_named_so_that_any_process_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    scheduler = Scheduler(loader=False)
    scheduler.before = lambda path, body: told.append(body.get("model_path", "/"))
    (tmp_path / "shared").mkdir()
    async with rig(tmp_path / "shared", scheduler, transport=Disk(Path("disk"))) as made:
        await made.send(1)
    assert all(Path(path).is_absolute() for path in told)


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
        ranks = made.schedulers[0]

        def damage(path: str, body: dict) -> None:
            for file in tmp_path.glob("agentrl-weights-*"):
                if path == "/update_weights_from_tensor" and (data := bytearray(file.read_bytes())):
                    data[0] ^= 1
                    file.write_bytes(data)
                    ranks.before = lambda path, body: None

        ranks.before = damage
        with pytest.raises(EngineError, match="arrived damaged in http"):
            await made.send(2)
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
    transport = Distributed(timeout_s=0.5, folder=tmp_path)
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
