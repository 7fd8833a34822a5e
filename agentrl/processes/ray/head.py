"""A Ray of this run's own: one machine, on the loopback address, for whoever has its token.

It runs under a guard, in a process group of its own: it ends with this process, also where that is killed,
and a signal to the run's group does not reach it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from agentrl.errors import ConfigError
from agentrl.processes import guard
from agentrl.processes.ray.folder import keep_logs, link, private_folder, remove
from agentrl.processes.ray.listening import address_of

LOOPBACK = "127.0.0.1"
_CURRENT = "ray_current_cluster"
_START_S = 120.0
_MOST_STARTS = 2
_POLL_S = 0.05
_GRACE_S = 3.0
_LAST_LINES = 5


class RayHead(NamedTuple):
    """A running Ray. variables: of each process that talks to it; the token among them is a secret."""

    address: str
    variables: dict[str, str]


@contextmanager
def own_head(folder: Path) -> Iterator[RayHead]:
    """A Ray for the block. folder: has its logs while it runs, and afterwards.

    waits for: its address. unblocked by: that, its end, or two minutes. on shutdown: all its processes end.

    Raises:
        ConfigError: it did not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove(folder / "logs")
    variables = {
        # Read where Ray is imported: it binds to the loopback address, not to the network's.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _token(),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Nobody reads them; with ray[default], this process would go on connecting to who collected them.
        "RAY_enable_metrics_collection": "0",
        # Settings of the user's other clusters.
        "RAY_ADDRESS": "",
    }
    log = folder / "head.log"
    with private_folder() as place:
        try:
            for number in range(1, _MOST_STARTS + 1):
                with _started(place, variables, log) as process:
                    address = _address(place, process, log, is_last=number == _MOST_STARTS)
                    if address is None:
                        continue
                    link(folder / "logs", place)
                    yield RayHead(address, variables)
                    return
        finally:
            # On a full disk they are lost, and not the error of the run.
            with suppress(OSError):
                keep_logs(folder / "logs")


@contextmanager
def _started(place: Path, variables: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    options = {
        "node-ip-address": LOOPBACK,
        "port": "0",
        "include-dashboard": "false",
        # A free one. Only ray[default] listens there, by itself at a port that another Ray may have.
        "dashboard-agent-listen-port": "0",
        "temp-dir": str(place),
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *flags]
    (place / _CURRENT).unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    with log.open("xb") as out:
        process = subprocess.Popen(
            guard.command(command, _GRACE_S),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_GRACE_S + guard.GIVE_UP_S + 1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@cache
def _token() -> str:
    """The token of this process's clusters: Ray reads it once, at the first connection."""
    return secrets.token_hex(32)


def _address(place: Path, process: subprocess.Popen[bytes], log: Path, *, is_last: bool) -> str | None:
    """The address of the head, once it is up; None = it ended, as on a machine that is too busy for Ray's
    limit of 30 s, and may be started again.

    What Ray writes to `place` says only that it is up. The address is where a process of this head listens,
    so the token goes to no other.
    """
    deadline = time.monotonic() + _START_S
    while not (place / _CURRENT).exists() or (address := address_of(process.pid, LOOPBACK)) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            if not is_last:
                return None
            how = "did not start in time" if process.poll() is None else "ended while it started"
            lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            raise ConfigError(
                f"the Ray of this run {how} (see {log}): {' | '.join(lines)}; mend that, or start a cluster "
                "and give its ray_address."
            )
        time.sleep(_POLL_S)
    return address
