"""Two machines of one Ray cluster, as network namespaces of this one; for a process in namespaces of its own.

    unshare -Urnm --fork --kill-child python -m MODULE ...

Ray's head is on the near machine, where this process runs. They share a disk, but for Ray's session, and no
memory that has a name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

NAMESPACES = ("unshare", "-Urnm", "--fork", "--kill-child")
"""The program that starts such a process."""
NEAR, FAR = "10.231.0.1", "10.231.0.2"
_PORT = 6379
_NETWORK = """
mount -t tmpfs none /run
ip link set lo up
ip netns add far
ip link add near type veth peer name far
ip link set far netns far
ip addr add 10.231.0.1/24 dev near
ip link set near up
ip netns exec far ip addr add 10.231.0.2/24 dev far
ip netns exec far ip link set far up
ip netns exec far ip link set lo up
ip route add default via 10.231.0.2
ip netns exec far ip route add default via 10.231.0.1
"""
IN_FAR = ("ip", "netns", "exec", "far")
"""What a command on the far machine begins with."""
# Ray finds the raylet of this machine by the files of its session, SGLang its ranks by shared memory.
_OWN_FILES = (
    *("unshare", "-m", "sh", "-c"),
    'mount -t tmpfs none "$0" && mount -t tmpfs none /dev/shm && exec "$@"',
)
_STARTED = "Ray runtime started"
_END_S = 60.0
_PATIENCE_S = 300.0
_POLL_S = 0.05


def connect() -> None:
    """Make the two machines and their network, without a Ray."""
    for line in _NETWORK.strip().splitlines():
        subprocess.run(line.split(), check=True)


@contextmanager
def two_machines(
    near_cpus: int = 1,
    far_cpus: int = 1,
    variables: Mapping[str, str] | None = None,
    *,
    waits: bool = True,
) -> Iterator[str]:
    """A Ray of both machines for the block; gives its address.

    variables: of the environment of Ray. waits: until the far machine is up, too.
    """
    connect()
    address = f"{NEAR}:{_PORT}"
    far = [f"--address={address}", f"--node-ip-address={FAR}", f"--num-cpus={far_cpus}"]
    with one_machine(NEAR, _PORT, near_cpus, variables=variables) as place:
        log = place.parent / "far.log"
        with _ray(far, log, variables, where=[*IN_FAR, *_OWN_FILES, str(place)]):
            wait_for(lambda: not waits or _STARTED in log.read_text())
            yield address


@contextmanager
def one_machine(
    host: str, port: int, cpus: int, options: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """A Ray of one machine for the block; gives the folder with its files. options: of `ray start`."""
    with tempfile.TemporaryDirectory(prefix="r") as temporary:
        # Ray opens its folder to all users; the one around it stays this user's alone.
        place = Path(temporary) / "r"
        head = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
        head += [f"--temp-dir={place}", f"--num-cpus={cpus}", *options]
        with _ray(head, Path(temporary) / "near.log", variables):
            wait_for((place / "ray_current_cluster").exists)
            yield place


@contextmanager
def _ray(
    arguments: Sequence[str], log: Path, variables: Mapping[str, str] | None, where: Sequence[str] = ()
) -> Iterator[None]:
    """`ray start` for the block, in the foreground; it ends in good order."""
    options = ["--num-gpus=0", "--disable-usage-stats", "--block"]
    command = [*where, sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *options]
    with ExitStack() as stack:
        out = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})},
            start_new_session=True,
        )
        stack.callback(process.wait, _END_S)
        stack.callback(process.terminate)
        yield


def processes_of_far() -> list[int]:
    """All processes of the far machine."""
    listed = subprocess.run(["ip", "netns", "pids", "far"], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def kill_far() -> None:
    """Kill all processes of the far machine at once."""
    for pid in processes_of_far():
        os.kill(pid, signal.SIGKILL)


def cut_off_far() -> None:
    """Take down the network of the far machine, whose processes go on."""
    subprocess.run([*IN_FAR, "ip", "link", "set", "far", "down"], check=True)


def bring_back_far() -> None:
    """Bring up that network again."""
    subprocess.run([*IN_FAR, "ip", "link", "set", "far", "up"], check=True)


def wait_for(condition: Callable[[], bool], seconds: float = _PATIENCE_S) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it took too long.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it took longer than {seconds:g} s")
        time.sleep(_POLL_S)
