"""Ranks that a launcher started: each is a process of the same command, and finds the driver of rank 0.

What goes between them is pickled, here and in torch's own collectives: the network has to be trusted.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from agentrl.errors import ConfigError, TrainerError
from agentrl.trainer.launch.meeting import Meeting, found_by, kept, listening
from agentrl.trainer.launch.members import LaunchedRank
from agentrl.trainer.launch.rank import obey
from agentrl.trainer.launch.seats import Seat

PATIENCE_S = 600.0
_HELLO_S = 5.0
_HELLO_BYTES = 4096
_AGAIN_S = 0.1
_DRIVER = "driver"
# A machine that is gone without a word is missed within a minute.
_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


@dataclass(frozen=True, slots=True)
class LaunchedRanks:
    """All ranks but the driver's own. meeting: where they find each other. members: rank 1, rank 2, ..."""

    seat: Seat
    meeting: Meeting
    members: Sequence[LaunchedRank]


@contextmanager
def gathered(seat: Seat, patience_s: float = PATIENCE_S) -> Iterator[LaunchedRanks]:
    """All ranks that were launched beside this one, which is rank 0's driver; they end with the block.

    waits for: every rank. unblocked by: the last one's coming, the end of one that has come, patience_s. on
    shutdown: every pipe is closed, and the ranks end.

    Raises:
        UserError: the port cannot be used, not all ranks come in time, or two have the same number.
        TrainerError: a rank has gone before all were there.
    """
    meeting = _meeting(seat)
    keeper = None if seat.kept else kept(seat.host, seat.port)
    token = secrets.token_hex()
    found: dict[int, LaunchedRank] = {}
    deadline = time.monotonic() + patience_s
    try:
        with listening(seat.host, 0) as door:
            store = meeting.store(patience_s)
            with found_by(seat.host, seat.port):
                store.set(_DRIVER, json.dumps([door.getsockname()[1], token]))
            while len(found) < seat.size - 1:
                _wait_at(door, seat, found, deadline)
                _admit(door, seat, token, found)
        yield LaunchedRanks(seat, meeting, [found[number] for number in range(1, seat.size)])
    finally:
        for rank in found.values():
            rank.pipe.close()
        del keeper


def serve_launched(seat: Seat, preloaded: str, patience_s: float = PATIENCE_S) -> None:
    """Be the rank of a seat until the driver has gone. preloaded: the module with its worker.

    Raises:
        ConfigError: there is no driver.
    """
    deadline = time.monotonic() + patience_s
    # torch says much about a store that is not there yet.
    _connected(seat, seat.port, deadline).close()
    store = _meeting(seat).store(max(_AGAIN_S, deadline - time.monotonic()))
    with found_by(seat.host, seat.port):
        while not store.check([_DRIVER]):
            _look_again(seat, deadline)
        port, token = json.loads(store.get(_DRIVER))
    connected = _connected(seat, port, deadline)
    hello = json.dumps([token, str(seat.number), str(os.getpid()), socket.gethostname()])
    connected.sendall(f"{hello}\n".encode())
    obey(_piped(connected), seat.local, preloaded)


def _wait_at(door: socket.socket, seat: Seat, found: Mapping[int, LaunchedRank], deadline: float) -> None:
    """Wait until somebody knocks."""
    ready = wait([door, *(rank.pipe for rank in found.values())], max(0, deadline - time.monotonic()))
    for number, rank in found.items():
        if rank.pipe in ready:
            raise TrainerError(
                f"rank {number} of the trainer ({rank.where}) {rank.fate()}; look at its output."
            )
    if not ready:
        missing = ", ".join(str(number) for number in range(1, seat.size) if number not in found)
        raise ConfigError(
            f"of WORLD_SIZE = {seat.size} ranks, number {missing} did not come to "
            f"{seat.host}:{seat.port} in time; start this command once for each, with a RANK of its own."
        )


def _admit(door: socket.socket, seat: Seat, token: str, found: dict[int, LaunchedRank]) -> None:
    caller = door.accept()[0]
    hello = _hello(caller)
    # Anyone may knock.
    if not hello or not secrets.compare_digest(hello[0].encode(), token.encode()):
        caller.close()
        return
    number = int(hello[1])
    if number in found:
        raise ConfigError(f"two processes have RANK = {number}; give each of them a RANK of its own.")
    if not 0 < number < seat.size:
        raise ConfigError(
            f"RANK = {number} came to the run of RANK = 0, which has WORLD_SIZE = {seat.size}; start all of "
            "them with the same settings."
        )
    found[number] = LaunchedRank(_piped(caller), int(hello[2]), hello[3])


def _hello(caller: socket.socket) -> list[str]:
    """The words that a caller begins with, in one line; nothing where they make no sense, or are slow."""
    said, deadline = b"", time.monotonic() + _HELLO_S
    # Nobody who may come in says more before it is asked. A stranger may nest what json reads as deep as it
    # likes.
    with suppress(OSError, ValueError, RecursionError):
        while not said.endswith(b"\n") and len(said) < _HELLO_BYTES:
            # Raises ValueError when there is no time left.
            caller.settimeout(deadline - time.monotonic())
            said += caller.recv(_HELLO_BYTES) or b"\n"
        words = json.loads(said)
        return [str(word) for word in words] if isinstance(words, list) and len(words) == 4 else []
    return []


def _meeting(seat: Seat) -> Meeting:
    return Meeting(seat.host, seat.port, f"agentrl-{seat.attempt}")


def _connected(seat: Seat, port: int, deadline: float) -> socket.socket:
    while True:
        with suppress(OSError):
            connected = socket.create_connection((seat.host, port), timeout=_HELLO_S)
            # Where nobody listens, this machine may give the caller that very port, and it meets itself.
            if connected.getsockname() != connected.getpeername():
                return connected
            connected.close()
        _look_again(seat, deadline)


def _look_again(seat: Seat, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ConfigError(
            f"rank 0 was not at {seat.host}:{seat.port} (MASTER_ADDR, MASTER_PORT) in time; start this "
            "command there, too, with RANK = 0."
        )
    time.sleep(_AGAIN_S)


def _piped(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    for level, option, value in _ALIVE:
        connected.setsockopt(level, option, value)
    return Connection(connected.detach())
