"""The real SGLang and sglang-router: start, stop, kill, removal and addition; sessions keep their server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx2
import pytest

from agentrl.engine.sglang import wire
from agentrl.engine.sglang.launch import ServerReplicas, Servers, ServerSettings
from tests.engine.serving import save_tiny, sglang_python
from tests.engine.sglang_launch.starting import STAND_IN, settings
from tests.tools.mcp.watching import alive, servers, until

pytestmark = pytest.mark.full

TURNS = 4


def real(folder: Path) -> ServerSettings:
    return ServerSettings(
        model=save_tiny(folder / "model"),
        log_folder=folder / "logs",
        device="cpu",
        python=sglang_python(),
        arguments={"context_length": 256, "max_total_tokens": 4000, "log_level_http": "info"},
        first_wait_s=300.0,
    )


async def generated(url: str, session: str, ids: Sequence[int] = (1, 10, 20, 30)) -> dict:
    """The reply to a request of a session."""
    body = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    async with httpx2.AsyncClient(trust_env=False, timeout=120) as client:
        reply = await client.post(f"{url}/generate", json=body, headers={wire.ROUTING_KEY: session})
    assert reply.status_code == 200, reply.text
    return reply.json()


def requests_of(log: Path) -> int:
    """How many requests a server has answered, by its own log."""
    return log.read_text().count("POST /generate")


async def play(url: str, sessions: Sequence[str], logs: Sequence[Path]) -> dict[str, Counter[Path]]:
    """The servers of each session's turns: all sessions at once in the first turn, then in sequence."""
    await asyncio.gather(*(generated(url, session) for session in sessions))
    servers_of: dict[str, Counter[Path]] = {session: Counter() for session in sessions}
    for _ in range(TURNS):
        for session in sessions:
            before = [requests_of(log) for log in logs]
            await generated(url, session)
            await until(lambda before=before: [requests_of(log) for log in logs] != before)
            servers_of[session].update(
                log for log, n in zip(logs, before, strict=True) if requests_of(log) > n
            )
    return servers_of


@pytest.mark.faults
async def test_a_server_comes_up_is_killed_comes_up_and_is_gone(tmp_path: Path) -> None:
    async with Servers(ServerReplicas(real(tmp_path))) as launched:
        server = launched.servers[0]
        assert (await generated(server.url, "a"))["meta_info"]["weight_version"] == "0"
        below = servers()
        assert len(below) >= 4, "the guard, the server, its scheduler, its detokenizer"
        (main,) = [pid for pid in below if "launch_server" in cmdline(pid) and "guard.py" not in cmdline(pid)]
        os.kill(main, signal.SIGKILL)
        await until(lambda: not server.running)
        assert server.returncode == 128 + signal.SIGKILL
        assert not any(map(alive, below))
        await server.start()
        assert (await generated(server.url, "a"))["output_ids"]
        below = servers()
    assert not any(map(alive, below))


def cmdline(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")


async def test_sessions_stay_on_their_server_and_a_restarted_one_gets_requests(tmp_path: Path) -> None:
    events: list[str] = []
    async with Servers(ServerReplicas(real(tmp_path), count=2), on_event=events.append) as launched:
        first, second = launched.servers
        router, logs = launched.router, [first.log, second.log]
        assert router is not None
        assert set(await router.workers()) == {first.url, second.url}
        servers_of = await play(router.url, [f"episode-{i}" for i in range(8)], logs)
        logs_of = {session: list(counts) for session, counts in servers_of.items()}
        print(json.dumps({s: {log.name: n for log, n in counts.items()} for s, counts in servers_of.items()}))
        assert all(len(counts) == 1 for counts in logs_of.values()), "each session on one server"
        assert {counts[0] for counts in logs_of.values()} == set(logs), "both servers had sessions"

        await first.stop()
        await router.remove(first.url)
        assert await router.workers() == (second.url,)
        for session in servers_of:
            assert (await generated(router.url, session))["output_ids"], (
                "its sessions move to the other server"
            )

        await first.start()
        await router.add(first.url)
        before = requests_of(first.log)
        await asyncio.gather(*(generated(router.url, f"late-{i}") for i in range(8)))
        await until(lambda: requests_of(first.log) > before)
    assert events[-1] == "stopping 2 servers"


async def test_the_router_lists_prefill_and_decode_servers(tmp_path: Path) -> None:
    """A real router with stand-in servers: SGLang transfers keys and values between servers only on GPUs."""
    (tmp_path / "sglang").symlink_to(STAND_IN / "sglang")
    chosen = {"python": sglang_python(), "python_path": (tmp_path,)}
    groups = [ServerReplicas(settings(tmp_path, role=role, **chosen)) for role in ("prefill", "decode")]
    async with Servers(*groups) as launched:
        prefill, decode = launched.servers
        assert launched.router is not None
        for again in (False, True):
            if again:
                await launched.router.remove(prefill.url)
                await launched.router.add(prefill.url)
            reply = httpx2.get(f"{launched.router.url}/workers", trust_env=False).json()
            workers = {worker["url"]: worker for worker in reply["workers"]}
            assert workers[prefill.url]["worker_type"] == "prefill"
            assert workers[prefill.url]["bootstrap_port"] == prefill.bootstrap_port
            assert workers[decode.url]["worker_type"] == "decode"
