"""The network interface that leads to processes of other machines."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

_SIOCGIFADDR = 0x8915  # from linux/sockios.h
_REQUEST_BYTES = 40
_NAME_BYTES = 15
_ANY_PORT = 9


def use_interface_to(host: str) -> None:
    """Have gloo and NCCL use the interface that leads to `host`, unless the environment names another one."""
    for name, value in interface_variables(host).items():
        os.environ.setdefault(name, value)


def interface_variables(host: str) -> dict[str, str]:
    """The variables that have gloo and NCCL use the interface that leads to `host`; {} = it is loopback.

    Left to itself, gloo takes the address of the machine's name, which is often the loopback address.
    """
    name = None if is_loopback(host) else interface_to(host)
    return {} if name is None else {f"{library}_SOCKET_IFNAME": name for library in ("GLOO", "NCCL")}


def is_loopback(host: str) -> bool:
    """Whether a name is a loopback address on every machine.

    A machine's own name is not, though that machine may resolve it to a loopback address.
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def interface_to(host: str) -> str | None:
    """The name of the interface whose address this machine has on the way to `host`; None = not known."""
    try:
        with _route_to(host) as probe:
            address = socket.inet_aton(probe.getsockname()[0])
            return next(
                (name for _, name in socket.if_nameindex() if _address_of(probe, name) == address), None
            )
    except OSError:
        return None


def address_to(host: str) -> str | None:
    """The address that this machine has on the way to another one; None = `host` is this machine, or no route
    to it is known."""
    try:
        with _route_to(host) as probe:
            own, there = probe.getsockname()[0], probe.getpeername()[0]
    except OSError:
        return None
    return None if own == there else str(own)


@contextmanager
def _route_to(host: str) -> Iterator[socket.socket]:
    """A socket with the addresses of both ends of the way to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        yield probe


def _address_of(control: socket.socket, name: str) -> bytes | None:
    request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:_NAME_BYTES])
    try:
        return fcntl.ioctl(control.fileno(), _SIOCGIFADDR, request)[20:24]
    except OSError:
        # It has no address.
        return None
