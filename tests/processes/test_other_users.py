"""Other users of the machine: no file and no address of theirs counts, and none of Ray's is theirs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.processes.ray import folder, head, listening, session

NOBODY = 65534
# Only root can act as another user, too.
as_root = pytest.mark.parametrize("user", [NOBODY] if os.geteuid() == 0 else [])
# Only root can give a folder away.
SHARED = ["a link", "open to all", *(["of another user"] if os.geteuid() == 0 else [])]
BECOME = f"""
import json, os, select, socket, sys
from pathlib import Path
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""
# In a folder of all users: whatever turns up there gets a file with an address, as long as that can be made.
PLANTING = (
    BECOME
    + """
base, seen, planted = Path(sys.argv[1]), set(), []
print("ready", flush=True)
while not select.select([0], [], [], 0.002)[0]:
    for path in base.iterdir():
        seen.add(path.name)
        for place in (path, path / "r"):
            try:
                (place / "ray_current_cluster").write_text(sys.argv[2])
                planted.append(str(place))
            except OSError:
                pass
print(json.dumps([len(seen), planted]))
"""
)
ATTACKS = (
    BECOME
    + """
ray, session, pids = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
attacks = {
    "list the folder": lambda: os.listdir(ray.parent),
    "list what Ray made": lambda: os.listdir(ray),
    "plant an address": lambda: (ray / "ray_current_cluster").write_text("127.0.0.1:1"),
    "plant a file beside it": lambda: (ray.parent / "x").write_text("x"),
    "lead the session elsewhere": lambda: os.symlink("/tmp", ray / "x"),
    "move the folder": lambda: os.rename(ray.parent, str(ray.parent) + "x"),
    "move what Ray made": lambda: os.rename(ray, str(ray) + "x"),
    "read a port": lambda: (session / sys.argv[3]).read_text(),
    "write a log": lambda: (session / "logs" / "raylet.out").open("a").write("x"),
    "plant a program": lambda: (session / "runtime_resources" / "x.py").write_text("x"),
    "talk to the raylet": lambda: connect(session / "sockets" / "raylet"),
    "talk to the store": lambda: connect(session / "sockets" / "plasma_store"),
    "read the token": lambda: [open(f"/proc/{pid}/environ").read() for pid in sys.argv[4:]],
}
succeeded = []
for name, attack in attacks.items():
    try:
        attack()
        succeeded.append(name)
    except PermissionError:
        pass
print(json.dumps([len(attacks), succeeded]))
"""
)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A folder for temporary files that all users share, with a short path, as /tmp is."""
    del tmp_path  # Made before, and so elsewhere.
    path = Path(tempfile.mkdtemp(prefix="e", dir="/tmp"))
    path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def listener():
    """A program that is no Ray, as another user might have it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def address(of: socket.socket) -> str:
    return f"127.0.0.1:{of.getsockname()[1]}"


def result_of(script: str, *arguments: object) -> list:
    command = [sys.executable, "-I", "-c", script, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.full
@as_root
def test_another_user_reaches_nothing_of_a_ray_while_it_starts_and_while_it_runs(
    base, tmp_path, listener, user
):
    assert user == NOBODY
    planter = subprocess.Popen(
        [sys.executable, "-I", "-c", PLANTING, str(base), address(listener)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert planter.stdout is not None
    assert planter.stdout.readline() == "ready\n"
    with head.own_head(tmp_path) as started:
        seen, planted = json.loads(planter.communicate(timeout=60)[0])
        assert seen == 1
        assert planted == []
        # A token would have come with a connection.
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert started.address != address(listener)
        [ray] = base.glob("agentrl-ray-*/r")
        latest = (ray / "session_latest").resolve()
        [port] = latest.glob("gcs_server_port_*")
        owned = [path.name for path in Path("/proc").iterdir() if path.name.isdecimal() and runs(path, ray)]
        assert len(owned) > 4
        assert result_of(ATTACKS, ray, latest, port.name, *owned) == [13, []]
        # Nothing else stops them: with the folder around it open, Ray's own is everybody's.
        ray.parent.chmod(0o755)
        succeeded = result_of(ATTACKS, ray, latest, port.name, *owned)[1]
        assert {"read a port", "plant a program", "lead the session elsewhere"} <= set(succeeded)
        ray.parent.chmod(0o700)
    assert list(base.iterdir()) == []
    assert {path for path in (tmp_path / "logs", tmp_path) if open_to_others(path)} == set()


def runs(process: Path, ray: Path) -> bool:
    with suppress(OSError):
        return bytes(ray) in (process / "cmdline").read_bytes()
    return False


def open_to_others(path: Path) -> bool:
    return bool(path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))


@pytest.mark.full
def test_an_address_in_the_folder_of_ray_counts_for_nothing(base, tmp_path, listener):
    """Even one that this user has written there, while Ray starts."""
    planted, ended = [], threading.Event()

    def plant():
        while not ended.wait(0.01):
            for place in base.glob("agentrl-ray-*/r"):
                (place / "ray_current_cluster").write_text(address(listener))
                planted.append(place)
                return

    thread = threading.Thread(target=plant)
    thread.start()
    try:
        with head.own_head(tmp_path) as started:
            assert planted
            assert started.address != address(listener)
            with socket.create_connection(("127.0.0.1", int(started.address.rpartition(":")[2])), 5):
                pass
        with pytest.raises(BlockingIOError):
            listener.accept()
    finally:
        ended.set()
        thread.join()


@contextmanager
def a_raylet(at: Path, *arguments: str, user: int | None = None):
    """A program of that name and with these arguments, which does nothing."""
    at.mkdir(exist_ok=True)
    at.chmod(0o755)
    program = at / "raylet"
    shutil.copy(shutil.which("sh"), program)
    command = [str(program), "-c", "echo ready; read x", *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, user=user
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process


@pytest.fixture
def started(monkeypatch):
    """The processes that a head has started."""
    pids: list[int] = []
    monkeypatch.setattr(listening.guard, "descendants", lambda pid: pids)
    return pids


def test_an_address_of_a_ray_counts_where_a_process_of_it_listens_and_nowhere_else(
    tmp_path, listener, started
):
    with a_raylet(tmp_path, f"--gcs-address={address(listener)}") as raylet:
        started.append(raylet.pid)
        # Its arguments name the socket of somebody else.
        assert listening.address_of(1, "127.0.0.1") is None
        started.append(os.getpid())
        assert listening.address_of(1, "127.0.0.1") == address(listener)
        assert listening.address_of(1, "127.0.0.2") is None


def test_a_socket_at_another_address_with_the_same_port_is_not_the_one(tmp_path, started):
    with socket.create_server(("127.0.0.2", 0)) as other:
        name = f"127.0.0.1:{other.getsockname()[1]}"
        with a_raylet(tmp_path, f"--gcs-address={name}") as raylet:
            started += [raylet.pid, os.getpid()]
            assert listening.address_of(1, "127.0.0.1") is None


def test_a_socket_of_ipv6_that_takes_ipv4_is_the_one(tmp_path, started):
    """Ray's is such a one."""
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::ffff:127.0.0.1", 0))
        server.listen()
        name = f"127.0.0.1:{server.getsockname()[1]}"
        with a_raylet(tmp_path, f"--gcs-address={name}") as raylet:
            started += [raylet.pid, os.getpid()]
            assert listening.address_of(1, "127.0.0.1") == name


def children() -> set[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in tasks for pid in path.read_text().split()}


@as_root
def test_auto_is_no_cluster_of_another_user(base, listener, user):
    """Ray takes the address from the arguments of any process that has the name of a raylet."""
    theirs, own = "--gcs-address=127.0.0.1:1", f"--gcs-address={address(listener)}"
    with a_raylet(base / "a", theirs, user=user) as stranger:
        found = listening.processes_of_this_user()
        assert os.getpid() in found
        assert stranger.pid not in found
        assert "127.0.0.1:1" not in listening.clusters_of(found)
        assert "127.0.0.1:1" in listening.clusters_of([stranger.pid])
        with a_raylet(base / "b", own):
            assert address(listener) in listening.clusters_of(listening.processes_of_this_user())


def test_auto_is_the_one_cluster_of_this_user_and_none_that_a_run_has_started(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "processes_of_this_user", children)
    with pytest.raises(ConfigError, match=r"ray_address = auto \(this user runs none on this machine\)"):
        session._of_this_user()
    with (
        a_raylet(tmp_path, "--gcs-address=10.0.0.7:6379"),
        a_raylet(tmp_path / "b", "--gcs-address=127.0.0.1:2", "--temp_dir=/tmp/agentrl-ray-12345678/r"),
    ):
        assert session._of_this_user() == "10.0.0.7:6379"
        expected = r"parts of 2 Ray clusters .+\(10\.0\.0\.7:6379, 10\.0\.0\.8:6379\); give"
        with (
            a_raylet(tmp_path / "c", "--gcs-address=10.0.0.8:6379"),
            pytest.raises(ConfigError, match=expected),
        ):
            session._of_this_user()


def test_a_folder_that_others_can_replace_is_refused(base):
    base.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"run chmod \+t {base}, or set TMPDIR"), folder.private_folder():
        pass
    inside = base / "i"
    inside.mkdir(mode=0o700)
    tempfile.tempdir = str(inside)
    with pytest.raises(ConfigError, match=rf"run chmod \+t {base}, or set TMPDIR"), folder.private_folder():
        pass
    assert list(inside.iterdir()) == []


@pytest.mark.parametrize("how", SHARED)
def test_a_folder_that_is_not_this_users_alone_is_refused(base, monkeypatch, how):
    """As on a file system that gives everything the same mode and owner."""
    victim = base / "victim"
    victim.mkdir(mode=0o700)
    (victim / "kept").write_text("kept")

    def made(prefix, dir):
        path = Path(dir) / f"{prefix}x"
        if how == "a link":
            path.symlink_to(victim)
            return str(path)
        path.mkdir(mode=0o700)
        path.chmod(0o777 if how == "open to all" else 0o700)
        if how == "of another user":
            os.chown(path, NOBODY, NOBODY)
        return str(path)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    with pytest.raises(ConfigError, match="can be this user's alone"), folder.private_folder():
        pass
    assert (victim / "kept").exists()


def test_the_longest_socket_of_ray_has_room_in_the_longest_path_that_is_taken(base):
    name = "x" * (folder._MOST_BYTES - len(str(base)) - 1)
    longest = base / name
    longest.mkdir()
    tempfile.tempdir = str(longest)
    with folder.private_folder() as place:
        sockets = place / f"session_{time.strftime('%Y-%m-%d_%H-%M-%S')}_123456_4194304" / "sockets"
        sockets.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(sockets / "plasma_store"))
    (base / f"{name}x").mkdir()
    tempfile.tempdir = str(base / f"{name}x")
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter one"), folder.private_folder():
        pass


def test_kept_logs_are_not_open_to_all_users(base, tmp_path):
    logs = tmp_path / "logs"
    with folder.private_folder() as place:
        (place / "session_2" / "logs" / "old").mkdir(parents=True)
        (place / "session_2" / "logs" / "raylet.out").write_text("started")
        (place / "session_2" / "logs").chmod(0o777)
        folder.link(logs, place)
        folder.keep_logs(logs)
    assert (logs / "raylet.out").read_text() == "started"
    assert stat.S_IMODE(logs.stat().st_mode) == 0o700


def test_a_link_in_the_runs_folder_goes_and_nothing_that_it_leads_to(base, tmp_path):
    victim = tmp_path / "agentrl-ray-mine" / "r" / "session_2" / "logs"
    stale = base / "agentrl-ray-12345678" / "r" / "session_2" / "logs"
    logs = tmp_path / "logs"
    for target in (victim, stale):
        target.mkdir(parents=True)
        logs.symlink_to(target)
        folder.remove(logs)
        assert not logs.is_symlink()
    assert victim.exists()
    assert stale.exists()
    for target in ("/", stale, logs):
        logs.symlink_to(target)
        folder.remove(logs)
        assert not logs.is_symlink()


ON_ANOTHER_MACHINE = """
import os, sys
from pathlib import Path
from agentrl.processes.ray.host import HostSettings, ObjectHost
planted = Path(os.environ["TMPDIR"]) / f"rank-0-{os.getpid()}.log"
planted.touch(mode=0o666)
ObjectHost(HostSettings("rank-0", None, {}))
print("a secret")
"""


def test_the_output_of_a_process_elsewhere_goes_to_no_file_that_was_there_before(base):
    subprocess.run(
        [sys.executable, "-c", ON_ANOTHER_MACHINE], env={**os.environ, "TMPDIR": str(base)}, check=True
    )
    texts = {path.read_text(): stat.S_IMODE(path.stat().st_mode) for path in base.iterdir()}
    assert texts == {"": 0o644, "a secret\n": 0o600}
