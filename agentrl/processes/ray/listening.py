"""Where the Ray of certain processes is, as the kernel knows it.

Ray itself writes addresses to files that all users can write, or takes them from the arguments of any user's
processes.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from agentrl.processes import guard

_RAYLET, _ADDRESS = "raylet", "--gcs-address="
# See Documentation/networking/proc_net_tcp in Linux.
_LISTENING = "0A"


def address_of(pid: int, host: str) -> str | None:
    """The address of the Ray that a process has started at an address of this machine (IPv4).

    Returns:
        `host:port`, where one of its descendants listens, so that no other program does; None = nowhere yet.
    """
    pids = guard.descendants(pid)
    for address in clusters_of(pids):
        place, _, port = address.rpartition(":")
        if place == host and port.isdecimal() and _listens(pids, host, int(port)):
            return address
    return None


def clusters_of(pids: Iterable[int], *, besides: str | None = None) -> set[str]:
    """The addresses of the clusters to which the raylets among the processes belong, by their arguments.

    besides: with which the names of folders begin whose clusters do not count.
    """
    found = set()
    for pid in pids:
        words = _arguments(pid)
        if Path(words[0]).name != _RAYLET or (besides and any(f"/{besides}" in word for word in words)):
            continue
        found |= {word.removeprefix(_ADDRESS) for word in words if word.startswith(_ADDRESS)}
    return found


def processes_of_this_user() -> list[int]:
    """The ids of the processes that are this user's in every respect; none of a program with other rights."""
    own, pids = str(os.geteuid()), []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                lines = (path / "status").read_text("utf-8", "replace").splitlines()
                users = next(line.split()[1:] for line in lines if line.startswith("Uid:"))
                if set(users) == {own}:
                    pids.append(int(path.name))
    return pids


def _arguments(pid: int) -> list[str]:
    """The command line of a process; one empty word for one that has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    return [""]


def _listens(pids: Iterable[int], host: str, port: int) -> bool:
    """Whether one of the processes listens at exactly this address."""
    sockets = _sockets_of(pids)
    ipv4, mapped = socket.inet_aton(host), socket.inet_pton(socket.AF_INET6, f"::ffff:{host}")
    for table, packed in {"tcp": ipv4, "tcp6": mapped}.items():
        place = f"{_as_printed(packed)}:{port:04X}"
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text("ascii").splitlines():
                row = line.split()
                if row[1] == place and row[3] == _LISTENING and f"socket:[{row[9]}]" in sockets:
                    return True
    return False


def _sockets_of(pids: Iterable[int]) -> set[str]:
    found = set()
    for pid in pids:
        # A process may end, or close a file, meanwhile.
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    found.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return found


def _as_printed(packed: bytes) -> str:
    """An address as the kernel prints it: words of 4 bytes, each a number in the order of this machine."""
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
