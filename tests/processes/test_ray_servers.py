"""Servers in allocations of Ray: the same programs, and nothing of them outlives actor or driver."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.assembly.fleet import FleetPlan
from agentrl.engine.config import EngineConfig
from agentrl.engine.sglang.launch import ServerReplicas, Servers
from agentrl.engine.sglang.launch.ray_servers import RayLauncher
from agentrl.errors import ConfigError, EngineUnavailableError
from agentrl.processes.placement import Allocation, ServerNeeds, layout_of
from agentrl.processes.ray.placement import placed
from tests.engine.sglang_launch.starting import about, logged_pids, settings

DRIVER = """
import asyncio, os, sys
from pathlib import Path
from agentrl.processes.config import ClusterConfig
from agentrl.processes.placement import ServerNeeds, layout_of
from agentrl.processes.ray.placement import placed
from agentrl.processes.ray.session import connected
from agentrl.engine.sglang.launch import ServerReplicas, Servers
from agentrl.engine.sglang.launch.ray_servers import RayLauncher
from tests.engine.sglang_launch.starting import settings

async def main(session, folder):
    placement = placed(session, layout_of(None, [ServerNeeds(0.1, 0)], colocate=False), 60)
    launcher = RayLauncher(session, placement.group, placement.servers)
    chosen = settings(folder, "stubborn", first_wait_s=120.0)
    async with Servers(ServerReplicas(chosen), launcher=launcher) as servers:
        print(servers.servers[0].actor_pid, flush=True)
        await asyncio.to_thread(sys.stdin.read)

folder = Path(sys.argv[1])
with connected(ClusterConfig(cluster="ray"), folder, os.environ) as session:
    asyncio.run(main(session, folder))
"""


@pytest.fixture(scope="module")
def placement(session):
    """Allocations for two servers."""
    placement = placed(session, layout_of(None, [ServerNeeds(0.1, 0)] * 2, colocate=False), 60)
    yield placement
    placement.remove()


@pytest.fixture
def launcher(session, placement):
    return RayLauncher(session, placement.group, placement.servers)


def patient(folder: Path, *habit: str, **changes: object):
    return settings(folder, *habit, first_wait_s=120.0, **changes)


def await_end(pids) -> None:
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


async def ended(server) -> None:
    while server.running:
        await asyncio.sleep(0.02)


async def test_servers_in_allocations_are_those_of_a_run_without_ray(launcher, tmp_path):
    """On the driver's machine: loopback addresses, no key, logs in the run's folder, no token of Ray."""
    async with Servers(ServerReplicas(patient(tmp_path), count=2), launcher=launcher) as launched:
        assert launched.router is not None
        assert set(await launched.router.workers()) == {server.url for server in launched.servers}
        for server in launched.servers:
            assert server.url.startswith("http://127.0.0.1:")
            assert server.key is None
            facts = about(server)
            assert not [name for name in facts["environment"] if name.startswith("RAY_")]
            here = settings(tmp_path).environment_of(())
            assert facts["environment"]["PYTHONSAFEPATH"] == "1"
            assert facts["environment"]["PYTHONPATH"] == here["PYTHONPATH"], "not that of Ray's interpreter"
        pids = [pid for server in launched.servers for pid in logged_pids(server.log)]
        assert len(pids) >= 4
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    await_end(pids)
    assert not any(server.running for server in launched.servers)


async def test_a_server_and_its_actor_are_killed_and_start_again_at_their_address(launcher, tmp_path):
    async with Servers(
        ServerReplicas(patient(tmp_path), count=2), router=False, launcher=launcher
    ) as launched:
        server, other = launched.servers
        address, pids = server.url, logged_pids(server.log)
        os.kill(pids[0], signal.SIGKILL)
        await ended(server)
        assert server.end_reason == "it ended (exit code 137)"
        await_end(pids)
        await server.start()
        assert server.url == address
        pids = [pid for pid in logged_pids(server.log) if pid not in pids]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        assert pids

        actor = server.actor_pid
        os.kill(actor, signal.SIGKILL)
        await ended(server)
        assert f"its actor, process {actor} on 127.0.0.1, was killed, or crashed" in server.end_reason
        await_end([actor, *pids])
        assert str(server.log) in server.log_tail()
        assert other.running
        await server.start()
        assert about(server)
        assert server.url == address


async def test_a_server_over_two_machines_is_a_part_on_each_which_start_and_end_together(launcher, tmp_path):
    """Both machines are this one: what differs are the parts, their actors, and where they meet."""
    wide = ServerReplicas(patient(tmp_path, machines=2, arguments={"tp_size": 4}))
    async with Servers(wide, launcher=launcher) as launched:
        (server,) = launched.servers
        assert launched.url == server.url
        parts = [about(part)["arguments"] for part in server.parts]
        assert [(each["nnodes"], each["node_rank"], each["tp_size"]) for each in parts] == [
            (2, 0, 4),
            (2, 1, 4),
        ]
        met = {each["dist_init_addr"] for each in parts}
        host, _, port = met.pop().rpartition(":")
        assert (met, host) == (set(), server.parts[0].allocation.host)
        assert int(port) == server.parts[0].meeting_port
        assert server.url == server.parts[0].url != server.parts[1].url
        assert [part.log.name for part in server.parts] == ["server-0.log", "server-0-1.log"]

        pids = logged_pids(server.parts[1].log)
        os.kill(pids[0], signal.SIGKILL)
        await ended(server)
        assert server.end_reason == "server-0-1: it ended (exit code 137)"
        assert str(server.parts[1].log) in server.log_tail()
        assert server.parts[0].running, "it waits for the other part"
        before, address = logged_pids(server.log), server.url
        await server.start()
        await_end([*pids, *before])
        assert (server.running, server.url) == (True, address)
        again = {about(part)["arguments"]["dist_init_addr"] for part in server.parts}
        assert len(again) == 1
        left = [pid for part in server.parts for pid in about(part)["pids"]]
    await_end(left)

    dies = ServerReplicas(patient(tmp_path / "dies", "ends", machines=2))
    with pytest.raises(EngineUnavailableError, match="ended with exit code 3 before it was up"):
        await Servers(dies, launcher=launcher).__aenter__()


async def test_a_server_that_does_not_start_says_why(launcher, tmp_path):
    wrong = ServerReplicas(patient(tmp_path, arguments={"no_such_thing": 1}), count=2)
    with pytest.raises(ConfigError, match="has no argument `no_such_thing`"):
        await Servers(wrong, launcher=launcher).__aenter__()
    dies = ServerReplicas(patient(tmp_path, "ends"), count=2)
    with pytest.raises(EngineUnavailableError, match="ended with exit code 3 before it was up") as caught:
        await Servers(dies, router=False, launcher=launcher).__aenter__()
    assert str(tmp_path / "server-") in str(caught.value)
    assert "no room for the weights" in str(caught.value)


async def test_a_start_that_is_interrupted_leaves_nothing(launcher, tmp_path):
    launched = Servers(ServerReplicas(patient(tmp_path, "hangs"), count=2), router=False, launcher=launcher)
    starting = asyncio.create_task(launched.__aenter__())
    while not all(logged_pids(server.log) for server in launched.servers):
        await asyncio.sleep(0.05)
    pids = [pid for server in launched.servers for pid in logged_pids(server.log)]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await_end(pids)


@pytest.mark.faults
def test_nothing_outlives_a_driver_that_is_killed(tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    try:
        actor = int(driver.stdout.readline())
        pids = logged_pids(tmp_path / "server-0.log")
        assert pids
        assert all(Path(f"/proc/{pid}").exists() for pid in (actor, *pids))
    finally:
        driver.kill()
        driver.stdin.close()
        driver.wait(60)
        driver.stdout.close()
    await_end([actor, *pids])


def test_servers_on_other_machines_get_a_key_and_no_shared_memory(session, placement, tmp_path):
    elsewhere = Allocation(0, "another", "10.0.0.9", ())
    launcher = RayLauncher(session, placement.group, [elsewhere, placement.servers[1]])
    assert not launcher.is_local
    assert launcher.host == session.host
    groups = Servers(ServerReplicas(settings(tmp_path), count=2), launcher=launcher)
    far, near = groups.servers
    assert far.settings.host == "10.0.0.9"
    assert far.key is not None
    assert len(far.key) == 64
    assert far.key not in repr(far.settings)
    assert (near.settings.host, near.key) == ("127.0.0.1", None)
    another = RayLauncher(session, placement.group, [elsewhere])
    assert another.key != launcher.key
    alone = Servers(ServerReplicas(settings(tmp_path)), launcher=another)
    assert alone.router is not None, "clients on this machine need no key"


async def test_shared_memory_is_refused_where_a_server_is_elsewhere(session, placement, tmp_path):
    launcher = RayLauncher(session, placement.group, [Allocation(0, "another", "10.0.0.9", ())])
    config = EngineConfig(engine="sglang", update_weights_transport="tensor")
    plan = FleetPlan(model=tmp_path, config=config, folder=tmp_path, on_event=print, launcher=launcher)
    with pytest.raises(ConfigError, match="is shared memory, and there are servers on other machines"):
        await plan.start()
