"""Servers that release memory: none is asked for what would crash it, and no request is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.engine.conformance import CHECKS
from agentrl.engine.sglang import SGLangPolicy
from agentrl.engine.sglang.control import ExternalServer, Server
from agentrl.engine.sglang.fleet import Fleet
from agentrl.engine.sglang.memory import ServerMemory
from agentrl.engine.sglang.transports.disk import Disk
from agentrl.errors import EngineError
from tests.engine.feeding import Rig, open_rig
from tests.engine.scheduling import Scheduler
from tests.engine.serving import CONTROL, embedded_server, save_tiny
from tests.engine.subjects import VOCAB, text_of
from tests.engine.test_conformance_fleet import SERVED_CAPS, subject_of

BOTH = ("weights", "kv_cache")


def memory_of(rig: Rig) -> ServerMemory:
    return ServerMemory(lambda: rig.servers, rig._hold, rig._report_lost, rig.sink)


async def test_servers_release_only_when_idle_and_resume_only_what_they_released(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler(), Scheduler()) as rig:
        memory = memory_of(rig)
        await rig.send(1)
        for scheduler in rig.schedulers:
            scheduler.calls.clear()
        assert await memory.release(BOTH) is None
        await memory.release(["kv_cache"])
        assert all(scheduler.released == set(BOTH) and scheduler.paused for scheduler in rig.schedulers)
        with pytest.raises(EngineError, match="weights were released; send some"):
            await memory.resume(["kv_cache"])
        await memory.resume(["weights"])
        await rig.send(2)
        await memory.resume(["weights"])
        await memory.resume(["kv_cache"])
        await rig.expect_version(2)
        for scheduler in rig.schedulers:
            assert not scheduler.released
            calls = [call for call in scheduler.calls if "_weights_" not in call]
            # Not until the cache is there, too: whoever asks for a token before crashes it.
            update = ["/pause_generation", "/update_weight_version"]
            assert calls == [
                *("/pause_generation", "/flush_cache", "/release_memory_occupation"),
                "/resume_memory_occupation",
                *update,
                *("/resume_memory_occupation", "/continue_generation"),
            ]
        assert rig.lost == []
        assert memory.tags == set()


async def test_a_server_that_is_restarted_meanwhile_releases_what_the_others_released(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler()) as rig:
        memory = memory_of(rig)
        await memory.release(["kv_cache"])
        async with Scheduler().listening() as url, Scheduler().listening() as late:
            rig.servers += [Server(url), Server(late)]
            await memory.renew(rig.servers[1])
            # The last one is still being started, and has all of its memory.
            await memory.resume(["kv_cache"])
            await memory.renew(rig.servers[2])
        assert [scheduler.released for scheduler in rig.schedulers] == [set()]
        assert rig.lost == []


async def test_servers_that_others_go_on_using_get_their_memory_and_their_weights_again(
    tmp_path: Path,
) -> None:
    async with open_rig(tmp_path, Scheduler(), Scheduler()) as rig:
        memory = memory_of(rig)
        await rig.send(1)
        await memory.release(BOTH)
        for scheduler in rig.schedulers:
            scheduler.calls.clear()
        await memory.give_back()
        await rig.expect_version(1)
        for scheduler in rig.schedulers:
            assert not scheduler.released
            assert not scheduler.paused
            resumed = [number for number, call in enumerate(scheduler.calls) if "resume_memory" in call]
            (sent, *_) = [number for number, call in enumerate(scheduler.calls) if "update_weights" in call]
            assert resumed[0] < sent < resumed[1]
        assert memory.tags == set()


async def test_a_server_that_dies_is_reported_and_the_others_resume(tmp_path: Path) -> None:
    async with open_rig(tmp_path, Scheduler(), Scheduler()) as rig:
        memory = memory_of(rig)
        await memory.release(["kv_cache"])
        dead = rig.servers[0] = Server("http://127.0.0.1:9")
        dead.released = {"kv_cache"}
        await memory.resume(["kv_cache"])
        assert rig.lost == [dead]
        assert rig.schedulers[1].released == set()


async def test_a_fleet_holds_its_requests_while_agentrls_own_server_has_released_its_memory(
    tmp_path: Path,
) -> None:
    (check,) = [check for check in CHECKS if check.needs == "releases_memory"]
    transport = Disk(tmp_path / "weights", model=save_tiny(tmp_path / "model"))
    async with embedded_server(max_context_len=128) as (url, engine):
        policy = SGLangPolicy(url, vocab_size=VOCAB, decode=text_of)
        fleet = Fleet([ExternalServer(url, 5)], None, policy, transport, _no_op, headers=CONTROL).watch()
        await check.run(subject_of(fleet, SERVED_CAPS, 128))
        cache = engine.memory.cache_bytes
        freed = await fleet.release_memory(["kv_cache"])
        assert engine.memory.cache_bytes == 0 < cache
        # Measured in the server, which is this process.
        assert freed is not None
        await fleet.resume_memory(["kv_cache"])
        assert engine.memory.cache_bytes == cache
        # A run that is interrupted in the trainer's turn.
        await fleet.release_memory(["kv_cache"])
        fleet.stays = True
        await fleet.close()
        assert engine.memory.cache_bytes == cache


async def _no_op() -> None:
    pass
