"""Messages between the processes: a length of four bytes, then JSON. The reader bounds the length."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import TypedDict


class SessionLimits(TypedDict):
    """Seconds, bytes and counts; the docstring of PythonTool defines each.

    network: the code may connect to one socket of the host, in a network of its own.
    """

    wall_s: float
    cpu_s: float
    memory_bytes: int
    files_bytes: int
    processes: int
    output_bytes: int
    stateful: bool
    network: bool


# No /dev/zero: a mapping of it is shared memory that is counted in no process.
DEVICES = ("null", "full", "random", "urandom")


class SandboxPlan(TypedDict):
    """The contents of the sandbox. All paths are absolute.

    mounts: [path outside, path inside], read-only. hidden: folders inside that are replaced by empty ones.
    links: [path inside, its target]. packages: the folder inside that is searched for packages.
    """

    mounts: Sequence[Sequence[str]]
    hidden: Sequence[str]
    links: Sequence[Sequence[str]]
    packages: str
    preload: Sequence[str]
    environment: Mapping[str, str]


_LENGTH = struct.Struct("!I")
MOST_BYTES = 64 * 2**20


def pack(message: object) -> bytes:
    """A message as bytes, with its length."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def hand_over(fd: int, listener: socket.socket) -> None:
    """Send a socket through a file descriptor that is one."""
    with listener, socket.socket(fileno=os.dup(fd)) as host:
        socket.send_fds(host, [b"n"], [listener.fileno()])


def write(fd: int, message: object) -> None:
    """Send a message through a file descriptor that blocks."""
    data = memoryview(pack(message))
    while data:
        data = data[os.write(fd, data) :]


def read(fd: int) -> object | None:
    """The next message; None where the other end is closed.

    Raises:
        ValueError: the bytes are no message.
    """
    header = _exactly(fd, _LENGTH.size)
    if header is None:
        return None
    length: int = _LENGTH.unpack(header)[0]
    if length > MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    body = _exactly(fd, length)
    return None if body is None else json.loads(body)


def _exactly(fd: int, number: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < number:
        part = os.read(fd, min(number - len(parts), 2**20))
        if not part:
            return None
        parts += part
    return bytes(parts)
