"""Several servers and their router: all start, or all are stopped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import httpx2
import pytest

from agentrl.engine.sglang.launch import RouterProcess, ServerProcess, ServerReplicas, Servers, router
from agentrl.errors import ConfigError, EngineUnavailableError
from tests.engine.sglang_launch.starting import about, logged_pids, settings
from tests.tools.mcp.watching import alive, servers, until


async def test_servers_start_at_once_and_the_router_sends_to_all(tmp_path: Path) -> None:
    (meeting := tmp_path / "meeting").mkdir()
    events: list[str] = []
    chosen = settings(tmp_path, "meets", str(meeting), "2")
    async with Servers(
        ServerReplicas(chosen, count=2, gpus=("4", "5", "6", "7")), on_event=events.append
    ) as launched:
        first, second = launched.servers
        assert launched.router is not None
        assert launched.url == launched.router.url
        assert set(await launched.router.workers()) == {first.url, second.url}
        assert about(first)["environment"]["CUDA_VISIBLE_DEVICES"] == "4,5"
        assert about(second)["environment"]["CUDA_VISIBLE_DEVICES"] == "6,7"
        pids = [pid for server in launched.servers for pid in about(server)["pids"]]
    assert not any(map(alive, pids))
    assert not launched.router.running
    assert events[0] == "starting 2 servers"
    assert any(sentence.startswith(f"server-1 is up at {second.url} after ") for sentence in events)
    assert events[-2:] == ["the router sends to 2 servers", "stopping 2 servers"]


async def test_some_prefill_and_some_decode(tmp_path: Path) -> None:
    groups = (
        ServerReplicas(settings(tmp_path, role="prefill"), gpus=("0",)),
        ServerReplicas(settings(tmp_path, role="decode"), count=2, gpus=("1", "2")),
    )
    async with Servers(*groups) as launched:
        first, *decoders = launched.servers
        assert launched.router is not None
        reply = httpx2.get(f"{launched.router.url}/workers", trust_env=False).json()
        assert "--pd-disaggregation" in reply["flags"]
        workers = {worker["url"]: worker for worker in reply["workers"]}
        assert set(workers) == {server.url for server in launched.servers}
        arguments = about(first)["arguments"]
        assert (workers[first.url]["worker_type"], arguments["disaggregation_mode"]) == ("prefill", "prefill")
        port = arguments["disaggregation_bootstrap_port"]
        assert workers[first.url]["bootstrap_port"] == port is not None
        for server, gpu in zip(decoders, "12", strict=True):
            assert about(server)["environment"]["CUDA_VISIBLE_DEVICES"] == gpu
            assert about(server)["arguments"]["disaggregation_mode"] == "decode"
            assert workers[server.url]["worker_type"] == "decode"
            assert "bootstrap_port" not in workers[server.url]


@pytest.mark.parametrize("roles", [("prefill",), ("decode",), ("regular", "decode")])
def test_roles_that_cannot_serve_together_are_refused(tmp_path: Path, roles: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"servers that are {' and '.join(sorted(roles))} cannot serve"):
        Servers(*(ServerReplicas(settings(tmp_path, role=role)) for role in roles))


async def test_one_server_has_no_router(tmp_path: Path) -> None:
    async with Servers(ServerReplicas(settings(tmp_path))) as launched:
        assert launched.router is None
        assert launched.url == launched.servers[0].url


async def test_an_error_in_the_block_ends_all(tmp_path: Path) -> None:
    pids: list[int] = []

    async def broken() -> None:
        async with Servers(ServerReplicas(settings(tmp_path), count=2), router=False) as launched:
            pids.extend(pid for server in launched.servers for pid in about(server)["pids"])
            os.kill(pids[0], signal.SIGKILL)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await broken()
    assert len(pids) == 6
    assert not any(map(alive, pids))


async def test_where_a_server_does_not_start_all_are_stopped(tmp_path: Path) -> None:
    (meeting := tmp_path / "meeting").mkdir()
    launched = Servers(ServerReplicas(settings(tmp_path, "meets", str(meeting), "3"), count=2))
    starting = asyncio.create_task(launched.__aenter__())
    await until(
        lambda: len(list(meeting.iterdir())) == 2 and all(logged_pids(s.log) for s in launched.servers)
    )
    pids = [pid for server in launched.servers for pid in logged_pids(server.log)]
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(EngineUnavailableError, match="server-0 ended with exit code 137 before it was up"):
        await starting
    assert not any(map(alive, pids))


async def test_a_wrong_argument_is_an_error_before_the_start(tmp_path: Path) -> None:
    events: list[str] = []
    wrong = ServerReplicas(settings(tmp_path, role="decode", arguments={"habbit": "x"}))
    launched = Servers(ServerReplicas(settings(tmp_path, role="prefill")), wrong, on_event=events.append)
    with pytest.raises(ConfigError, match="Did you mean `habit`"):
        await launched.__aenter__()
    assert (events, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(("count", "gpus"), [(0, ()), (2, ("0",)), (2, ("0", "1", "2"))])
def test_gpus_are_shared_out_evenly(tmp_path: Path, count: int, gpus: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{len(gpus)} GPUs cannot be divided evenly among {count} servers"):
        Servers(ServerReplicas(settings(tmp_path), count=count, gpus=gpus))


OURS = """
import asyncio, signal, sys
from pathlib import Path
from tests.engine.sglang_launch.starting import settings
from agentrl.engine.sglang.launch import ServerReplicas, Servers

signal.signal(signal.SIGINT, signal.default_int_handler)

async def main():
    chosen = settings(Path(sys.argv[1]), "hangs")
    async with Servers(ServerReplicas(chosen, count=2), on_event=lambda event: print(event, flush=True)):
        pass

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


async def test_ctrl_c_while_starting_leaves_no_process(tmp_path: Path) -> None:
    ours = subprocess.Popen([sys.executable, "-c", OURS, tmp_path], stdout=subprocess.PIPE, text=True)
    logs = [tmp_path / f"server-{i}.log" for i in range(2)]
    try:
        await until(lambda: all(map(logged_pids, logs)))
        below = servers()
        ours.send_signal(signal.SIGINT)
        output, _ = ours.communicate(timeout=20)
    finally:
        ours.kill()
    assert output.splitlines()[-2:] == ["stopping 2 servers", "interrupted"]
    assert len(below) >= 9, "the servers, their children, their guards"
    assert not any(map(alive, below))


async def test_the_router_adds_and_removes_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = settings(tmp_path)
    async with Servers(ServerReplicas(chosen)) as launched:
        worker, before = launched.servers[0], RouterProcess(chosen)
        try:
            with pytest.raises(EngineUnavailableError, match="does not answer"):
                await before.workers()
            await before.start()
            assert await before.workers() == ()
            for _ in range(2):
                await before.add(worker.url)
                assert await before.workers() == (worker.url,)
            for _ in range(2):
                await before.remove(worker.url)
                assert await before.workers() == ()
            monkeypatch.setattr(router, "CHANGE_TIMEOUT_S", 0.5)
            missing = ServerProcess(chosen, name="nobody")
            with pytest.raises(
                EngineUnavailableError, match=f"accepted a change of {missing.url} and did not"
            ):
                await before.add(missing.url)
        finally:
            await before.stop()
        assert before.returncode == 0


async def test_each_phase_of_a_start_is_told_as_it_begins_and_how_long_it_took(tmp_path):
    # A log that an earlier start has left says nothing about this one.
    (tmp_path / "server-0.log").write_text("Capture target decode CUDA graph begin.\n")
    entered, events = [], []

    def enter(server, phase):
        entered.append((server.name, phase, time.monotonic()))

    replicas = ServerReplicas(settings(tmp_path, "slow"))
    async with Servers(replicas, on_event=events.append, entered=enter) as launched:
        up_s = time.monotonic()
        names, phases, begins = zip(*entered, strict=True)
        assert set(names) == {"server-0"}
        assert phases == (
            *("importing", "joining the other GPUs", "loading weights", "allocating the cache"),
            *("capturing CUDA graphs", "warming up"),
        )
        # Each lasts half a second: a phase is told while it lasts, not when all are over.
        assert up_s - begins[-1] > 0.4
        assert all(later - earlier > 0.25 for earlier, later in pairwise(begins))
        sentence = next(event for event in events if event.startswith(f"server-0 is up at {launched.url}"))
    durations = dict(re.findall(r"(?:, |: )([a-z A-Z]+) ([0-9.]+) s", sentence))
    assert tuple(durations) == phases
    assert sum(map(float, durations.values())) == pytest.approx(up_s - begins[0], abs=0.6)
