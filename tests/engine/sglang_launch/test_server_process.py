"""A server as a process: it starts, or reports why not; and no process remains, whichever ends first."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from agentrl.engine.sglang.launch import ServerProcess
from agentrl.engine.sglang.launch.listener import PORT_OFFSET, free_ports
from agentrl.errors import ConfigError, EngineUnavailableError
from tests.engine.sglang_launch.starting import about, logged_pids, settings
from tests.tools.mcp.watching import alive, until


async def started(folder: Path, *habit: str, **changes) -> tuple[ServerProcess, list[int]]:
    """A server that is up, and the pids of all its processes."""
    server = ServerProcess(settings(folder, *habit, **changes))
    await server.start()
    return server, about(server)["pids"]


async def test_a_server_gets_its_address_its_model_its_devices_and_a_log(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    chosen = settings(tmp_path, device="cpu", environment={"OF_THE_TEST": "yes"})
    server = ServerProcess(chosen, name="third", gpus=("2", "3"))
    assert (server.running, server.returncode) == (False, None)
    await server.start()
    assert server.running
    reported = about(server)
    assert reported["arguments"]["port"] == server.port
    assert reported["arguments"]["host"] == "127.0.0.1"
    assert reported["arguments"]["model_path"] == str(Path("model").absolute())
    assert reported["arguments"]["weight_version"] == "0"
    assert reported["arguments"]["attention_backend"] == "torch_native"
    assert reported["arguments"]["dtype"] == "float32"
    assert reported["environment"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert reported["environment"]["SGLANG_USE_CPU_ENGINE"] == "1"
    assert reported["environment"]["OMP_NUM_THREADS"] == "1"
    assert reported["environment"]["OF_THE_TEST"] == "yes"
    assert server.log == tmp_path / "third.log"
    assert "habit:" in server.log.read_text()
    await server.stop()


async def test_a_server_measures_its_requests_in_a_folder_that_ends_with_it(tmp_path):
    server, _ = await started(tmp_path)
    folder = Path(about(server)["environment"]["PROMETHEUS_MULTIPROC_DIR"])
    assert about(server)["arguments"]["enable_metrics"]
    (folder / "counter.db").touch()
    await server.start()
    assert list(folder.iterdir()) == [], "a new one starts with none"
    await server.stop()
    assert not folder.exists()
    server, _ = await started(tmp_path, arguments={"enable_metrics": False})
    assert "PROMETHEUS_MULTIPROC_DIR" not in about(server)["environment"]
    await server.stop()


async def test_a_server_on_the_cpu_sees_no_card(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    server, _ = await started(tmp_path, device="cpu")
    assert about(server)["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    await server.stop()


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({}, (48, 48)),
        ({"max_running_requests": 12}, (12, 12)),
        ({"max-running-requests": 5000}, (5000, 512)),
        ({"cuda_graph_bs": [1, 2]}, (48, None)),
        ({"disable_cuda_graph": True}, (48, None)),
    ],
)
async def test_a_server_on_a_gpu_is_as_large_as_the_run_needs_or_as_told(tmp_path, arguments, sizes):
    server = ServerProcess(settings(tmp_path, arguments=arguments, max_in_flight=48))
    await server.start()
    reported = about(server)["arguments"]
    await server.stop()
    assert (reported["max_running_requests"], reported["cuda_graph_max_bs"]) == sizes


async def test_other_servers_are_of_sglangs_sizes(tmp_path):
    for changes in ({"device": "cpu", "max_in_flight": 48}, {}):
        server = ServerProcess(settings(tmp_path, **changes))
        command = " ".join(await server.command())
        assert "cuda-graph-max-bs" not in command
        assert "max-running-requests" not in command


async def test_compilers_of_a_server_keep_their_results_for_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server, _ = await started(tmp_path)
    assert about(server)["environment"]["TRITON_CACHE_DIR"] == str(tmp_path / "cache/agentrl/triton")
    await server.stop()


@pytest.mark.parametrize(
    ("chosen", "dtype"), [({}, "bfloat16"), ({"dtype": "float16"}, "float16"), ({"--dtype": "auto"}, "auto")]
)
async def test_a_server_on_a_gpu_computes_in_bfloat16_unless_told_otherwise(tmp_path, chosen, dtype):
    server, _ = await started(tmp_path, arguments=chosen)
    assert about(server)["arguments"]["dtype"] == dtype
    await server.stop()


@pytest.mark.parametrize("name", ["dtype", "--dtype"])
@pytest.mark.parametrize("dtype", ["float32", "float"])
def test_one_in_fp32_is_refused_on_a_gpu_alone(tmp_path, name, dtype):
    with pytest.raises(ConfigError, match="CUDA kernels take half precision only; leave its dtype out"):
        settings(tmp_path, arguments={name: dtype})
    settings(tmp_path, device="cpu", arguments={name: dtype})


@pytest.mark.parametrize("habit", ["", "stubborn"])
async def test_stopping_ends_all_processes_of_a_server(tmp_path: Path, habit: str) -> None:
    server, pids = await started(tmp_path, *filter(None, [habit]))
    assert len(pids) == 3
    assert all(map(alive, pids))
    await server.stop()
    assert [pid for pid in pids if alive(pid)] == []
    assert (server.running, server.returncode) == (False, 0)
    await server.stop()


async def test_what_waits_for_a_servers_end_clears_up_after_it(tmp_path: Path) -> None:
    tidied = tmp_path / "tidied"
    server, _ = await started(tmp_path, "stubborn", environment={"TIDIED": str(tidied)})
    await server.stop()
    assert tidied.read_text() == "yes"


async def test_a_server_that_ends_is_an_error_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "server-0.log").write_text("words of another day\n")
    with pytest.raises(EngineUnavailableError) as caught:
        await started(tmp_path, "ends")
    message = str(caught.value)
    assert message.startswith("server-0 ended with exit code 3 before it was up; the last lines of ")
    assert message.endswith("\n  one line\n  another\n   [31mno room for the weights")
    assert "words of another day" not in message
    assert "words of another day" in (tmp_path / "server-0.log").read_text()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_server_that_found_a_port_taken_is_started_once_more(tmp_path: Path, times: int) -> None:
    (folder := tmp_path / "collisions").mkdir()
    server = ServerProcess(settings(tmp_path / "logs", "collides", str(folder), str(times)))
    if times == 1:
        await server.start()
        assert len(list(folder.iterdir())) == 1
        assert all(map(alive, about(server)["pids"]))
        await server.stop()
    else:
        with pytest.raises(EngineUnavailableError, match="name: EADDRINUSE, message: address already in use"):
            await server.start()
        assert not server.running
    assert server.log.read_text().count("EADDRINUSE") == times


async def test_a_server_that_hangs_while_it_starts_is_stopped(tmp_path: Path) -> None:
    server = ServerProcess(settings(tmp_path, "hangs", first_wait_s=1.0))
    with pytest.raises(EngineUnavailableError, match="server-0 was not up after 1 s: see what it waits for"):
        await asyncio.wait_for(server.start(), 15)
    assert not server.running
    assert not any(map(alive, logged_pids(server.log)))


async def test_an_interrupted_start_leaves_no_process(tmp_path: Path) -> None:
    server = ServerProcess(settings(tmp_path, "hangs"))
    starting = asyncio.create_task(server.start())
    await until(lambda: logged_pids(server.log))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(map(alive, logged_pids(server.log)))


async def test_an_interrupted_stop_still_ends_the_server(tmp_path: Path) -> None:
    server, pids = await started(tmp_path)
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await until(lambda: not server.running)
    assert not any(map(alive, pids))


async def test_a_killed_server_takes_its_processes_along_and_starts_again_at_its_port(tmp_path: Path) -> None:
    server, pids = await started(tmp_path)
    url = server.url
    os.kill(pids[0], signal.SIGKILL)
    await until(lambda: not server.running)
    assert server.returncode == 128 + signal.SIGKILL
    assert not any(map(alive, pids))
    await server.start()
    assert server.url == url
    assert about(server)["pids"][0] != pids[0]
    await server.stop()


async def test_starting_a_server_that_runs_replaces_it(tmp_path: Path) -> None:
    server, pids = await started(tmp_path)
    await server.start()
    assert not any(map(alive, pids))
    assert all(map(alive, about(server)["pids"]))
    await server.stop()


async def test_a_killed_guard_takes_its_server_along(tmp_path: Path) -> None:
    server, pids = await started(tmp_path)
    apart = pids.pop()  # in a session of its own, where no process could end it any more
    os.kill(os.getpgid(pids[0]), signal.SIGKILL)
    await until(lambda: not server.running and not any(map(alive, pids)))
    os.kill(apart, signal.SIGKILL)


OURS = """
import asyncio, sys
from pathlib import Path
from tests.engine.sglang_launch.starting import about, settings
from agentrl.engine.sglang.launch import ServerProcess

async def main():
    server = ServerProcess(settings(Path(sys.argv[1]), "stubborn"))
    await server.start()
    print(*about(server)["pids"], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_when_we_are_killed_our_server_is_gone(tmp_path: Path) -> None:
    ours = subprocess.Popen([sys.executable, "-c", OURS, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in ours.stdout.readline().split()]
        assert len(pids) == 3
    finally:
        ours.kill()
        ours.communicate(timeout=10)
    await until(lambda: not any(map(alive, pids)))


async def test_a_port_in_use_is_an_error_before_the_start(tmp_path: Path) -> None:
    first, _ = await started(tmp_path)
    second = ServerProcess(settings(tmp_path), name="second", port=first.port)
    with pytest.raises(EngineUnavailableError, match=f"cannot listen at {first.url}: another process does"):
        await second.start()
    assert not second.log.exists()
    assert httpx2.get(f"{first.url}/about", trust_env=False).status_code == 200
    await first.stop()


def test_ports_differ_and_so_do_those_at_the_offset(tmp_path: Path) -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) + PORT_OFFSET < 32_768
    with pytest.raises(ConfigError, match="port 60000 cannot be a server's; choose one from 1 to 55535"):
        ServerProcess(settings(tmp_path), port=60_000)


async def test_a_log_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineUnavailableError, match="server-0 cannot be started: "):
        await ServerProcess(settings(tmp_path / "file")).start()
