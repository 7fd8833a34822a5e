"""A Ray of the run's own is this machine's alone, asks for its token, and is gone with the run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.processes.config import ClusterConfig
from agentrl.processes.ray import head, session
from agentrl.processes.ray.session import cluster_address, connected, is_job, passed_variables

JOB = json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}, "runtime_env": {}})
IN_JOB = {"RAY_JOB_CONFIG_JSON_ENV_VAR": JOB, "RAY_ADDRESS": "10.0.0.7:6379"}
DRIVER = """
import os, sys, time
from pathlib import Path
from agentrl.processes.config import ClusterConfig
from agentrl.processes.placement import RankNeeds, layout_of
from agentrl.processes.ray.actors import ActorObject
from agentrl.processes.ray.placement import placed
from agentrl.processes.ray.session import connected

folder = Path(sys.argv[1])
with connected(ClusterConfig(cluster="ray"), folder, os.environ) as session:
    import ray
    placement = placed(session, layout_of(RankNeeds(1, 1, 0.1, 0), (), colocate=False), 60)
    busy = ActorObject(session, placement.group, placement.ranks[0], folder / "rank-0.log")
    assert busy.pid
    # It does not end by itself.
    busy.create(time.sleep, 3600)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""
STRANGER = """
import os, sys
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
import ray
ray.init(sys.argv[1], _node_ip_address="127.0.0.1", log_to_driver=False)
print("admitted")
"""


def test_an_address_in_the_environment_attaches_only_where_ray_submitted_the_job():
    own, chosen = ClusterConfig(cluster="ray"), ClusterConfig(cluster="ray", ray_address="10.0.0.9:6379")
    assert cluster_address(own, {}) is None
    assert cluster_address(own, {"RAY_ADDRESS": "10.0.0.7:6379"}) is None
    assert cluster_address(own, IN_JOB) == "10.0.0.7:6379"
    assert cluster_address(chosen, IN_JOB) == "10.0.0.9:6379"


AUTO = """
from agentrl.processes.ray import session
session.processes_of_this_user = lambda: []
"""
ATTACHED = """
import os, sys
from pathlib import Path
from agentrl.processes.config import ClusterConfig
from agentrl.processes.ray.session import connected
from agentrl.errors import ConfigError
try:
    with connected(ClusterConfig(cluster="ray", ray_address=sys.argv[1]), Path(sys.argv[2]), os.environ):
        print("admitted")
except ConfigError as error:
    print(error)
"""
# Of a Ray on the loopback address.
HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "", "RAY_AUTH_TOKEN": ""}
NO_TOKEN = ({}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"metadata": {}}', '{"metadata": null}'])
def test_what_is_no_job_of_ray_is_none(text):
    assert not is_job({"RAY_JOB_CONFIG_JSON_ENV_VAR": text})


def test_variables_are_passed_on_by_name_and_by_pattern_and_nothing_else():
    environment = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0", "HF_HOME": "/hf", "TOKEN": "secret"}
    config = ClusterConfig(cluster="ray", ray_env_vars=["NCCL_*", "HF_HOME"])
    assert passed_variables(config, environment) == {
        name: value for name, value in environment.items() if name != "TOKEN"
    }
    with pytest.raises(ConfigError, match="ray_env_vars names HF_HOME, which is not set"):
        passed_variables(config, {})


def descendants_of(session: int) -> set[int]:
    """The processes whose command or environment names this run's folder of Ray, or that it started."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and session in ancestors(int(process.name)):
            found.add(int(process.name))
    return found


def ancestors(pid: int) -> list[int]:
    """The process itself and its parents."""
    chain = []
    while pid > 1:
        chain.append(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return []
    return chain


def attached(address: str, folder: Path, variables: Mapping[str, str]) -> str:
    """What a run with these variables prints that attaches to the address; it takes some seconds at most."""
    done = subprocess.run(
        [sys.executable, "-c", ATTACHED, address, str(folder)],
        env={**os.environ, **HERE, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """Where these processes listen: the address, as the kernel writes it, and the port."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                continue
    rows = [
        row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return {(host, int(port, 16)) for host, port in places}


@pytest.mark.full
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_a_ray_of_the_runs_own_is_reachable_from_here_alone_and_ends_with_the_run(tmp_path, killed):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    try:
        address = driver.stdout.readline().strip()
        assert address.startswith("127.0.0.1:")
        processes = descendants_of(driver.pid)
        assert len(processes) > 4
        loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
        places = listening(processes)
        assert {host for host, _ in places} <= loopback
        # With ray[default], each Ray has one more port, which is this one unless it is chosen.
        assert 52365 not in {port for _, port in places}
        refused = subprocess.run(
            [sys.executable, "-c", STRANGER, address],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert refused.returncode != 0
        assert "admitted" not in refused.stdout
        assert "AUTH" in refused.stderr.upper()
        for variables in NO_TOKEN:
            refusal = attached(address, tmp_path / "other", variables)
            assert f"asks for a token that is not set here, at ray_address = {address} (" in refusal
    finally:
        if killed:
            driver.send_signal(signal.SIGKILL)
        driver.stdin.close()
        driver.wait(120)
        driver.stdout.close()
    deadline = time.monotonic() + 60
    while left := {pid for pid in processes if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    if not killed:
        assert (tmp_path / "ray" / "logs" / "raylet.out").exists()
        assert not (tmp_path / "ray" / "logs").is_symlink()
    secrets = [
        path for path in tmp_path.rglob("*") if path.is_file() and b"RAY_AUTH_TOKEN" in path.read_bytes()
    ]
    assert secrets == []


@pytest.fixture(params=["refuses", "does not answer"])
def address(request):
    """Of a port of this machine at which no Ray is."""
    with socket.socket() as listener, ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        if request.param == "does not answer":
            listener.listen(0)
            # Whoever connects after these waits.
            for _ in range(2):
                client = waiting.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.full
def test_a_ray_that_did_not_come_up_is_started_once_more(tmp_path, monkeypatch):
    """As on a machine that is too busy for the time that Ray gives its raylet."""
    address, starts = head._address, []

    def first_is_none(place, process, log, *, is_last):
        starts.append(process)
        return None if len(starts) == 1 else address(place, process, log, is_last=is_last)

    monkeypatch.setattr(head, "_address", first_is_none)
    with head.own_head(tmp_path) as started:
        assert started.address.startswith("127.0.0.1:")
        assert starts[0].poll() is not None
        assert starts[1].poll() is None
    assert len(starts) == 2


def test_auto_is_the_ray_of_this_machine_whatever_the_environment_and_a_file_of_all_users_name(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as neighbour:
        neighbour.setblocking(False)
        address = f"127.0.0.1:{neighbour.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        # In a process of its own: where Ray is imported early, it leaves the loopback address.
        done = subprocess.run(
            [sys.executable, "-c", AUTO + ATTACHED, "auto", str(tmp_path / "run")],
            env={**os.environ, "RAY_ADDRESS": address, "RAY_TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        expected = "no Ray cluster answers at ray_address = auto (this user runs none on this machine)"
        assert done.stdout.startswith(expected)
        with pytest.raises(BlockingIOError):
            neighbour.accept()


def test_an_address_without_a_ray_is_one_sentence_within_seconds(tmp_path, address, monkeypatch):
    monkeypatch.setattr(session, "_CONNECT_S", 0.5)
    config = ClusterConfig(cluster="ray", ray_address=address)
    expected = rf"no Ray cluster answers at ray_address = {address} \(.+\); start one there, or leave"
    with pytest.raises(ConfigError, match=expected), connected(config, tmp_path, {}):
        pass
