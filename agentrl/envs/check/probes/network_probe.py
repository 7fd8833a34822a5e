"""Counts the connections that this process makes to other hosts while a check runs.

Sockets of Python raise the audit event `socket.connect` (PEP 578). Child processes, and packages that
connect in their own machine code, are not seen; whatever else runs in the process is.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from agentrl.envs.check.findings import ProbeResult, some, warning

_LOCAL = ("localhost", "")
_LISTENING: list[list[str]] = []


@contextmanager
def connections() -> Iterator[list[str]]:
    """The addresses of other hosts, `host:port`, that sockets connect to in the block."""
    _listen()
    found: list[str] = []
    _LISTENING.append(found)
    try:
        yield found
    finally:
        # By identity: two checks may have found the same.
        _LISTENING[:] = [other for other in _LISTENING if other is not found]


@cache
def _listen() -> None:
    # Once: a hook stays as long as the process. It returns at once where no check runs.
    sys.addaudithook(_heard)


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if not _LISTENING or event != "socket.connect":
        return
    address = arguments[1]
    if isinstance(address, tuple) and len(address) > 1 and not _is_local(str(address[0])):
        for found in _LISTENING:
            found.append(f"{address[0]}:{address[1]}")


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host in _LOCAL


def connecting(found: Sequence[str], *, declares_server: bool) -> ProbeResult:
    """A warning where an environment that declares no server connects to another host."""
    figures = {"connections": float(len(found))}
    if not found or declares_server:
        return ProbeResult((), figures)
    text = (
        f"episodes connect to other hosts: {some(list(dict.fromkeys(found)))}; bring the data along, or say "
        'so with `needs = ("server",)`.'
    )
    return ProbeResult((warning("network-undeclared", text),), figures)
