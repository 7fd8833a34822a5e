"""Ranks that a launcher started: each is a process of the same command, and connects to the driver, rank 0.

Messages between ranks are pickled, here and in torch's own collectives: the network has to be trusted.
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
from agentrl.trainer.launch.launcher_env import LauncherEnv
from agentrl.trainer.launch.members import LaunchedRank
from agentrl.trainer.launch.rank import run_rank
from agentrl.trainer.launch.rendezvous import Rendezvous, host_store, listening_socket, store_errors

TIMEOUT_S = 600.0
_HELLO_S = 5.0
_HELLO_BYTES = 4096
_RETRY_S = 0.1
_DRIVER = "driver"
# A machine that fails without closing its connections is noticed within a minute.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


@dataclass(frozen=True, slots=True)
class LaunchedRanks:
    """All ranks but the driver's own. rendezvous: the store of all ranks. members: rank 1, rank 2, ..."""

    env: LauncherEnv
    rendezvous: Rendezvous
    members: Sequence[LaunchedRank]


@contextmanager
def connected_ranks(env: LauncherEnv, timeout_s: float = TIMEOUT_S) -> Iterator[LaunchedRanks]:
    """All other launched ranks, connected to this one, the driver of rank 0; they end with the block.

    waits for: every rank. unblocked by: the last connection, the end of a connected rank, timeout_s. on
    shutdown: every pipe is closed, and the ranks end.

    Raises:
        UserError: the port cannot be used, not all ranks connect in time, or two have the same number.
        TrainerError: a rank disconnected before all were connected.
    """
    rendezvous = _rendezvous(env)
    own_store = None if env.has_agent_store else host_store(env.host, env.port)
    token = secrets.token_hex()
    ranks: dict[int, LaunchedRank] = {}
    deadline = time.monotonic() + timeout_s
    try:
        with listening_socket(env.host, 0) as listener:
            store = rendezvous.store(timeout_s)
            with store_errors(env.host, env.port):
                store.set(_DRIVER, json.dumps([listener.getsockname()[1], token]))
            while len(ranks) < env.world_size - 1:
                _wait_for_connection(listener, env, ranks, deadline)
                _accept(listener, env, token, ranks)
        yield LaunchedRanks(env, rendezvous, [ranks[number] for number in range(1, env.world_size)])
    finally:
        for rank in ranks.values():
            rank.pipe.close()
        del own_store


def serve_launched(env: LauncherEnv, preloaded: str, timeout_s: float = TIMEOUT_S) -> None:
    """Run as the rank that `env` describes until the driver has ended. preloaded: the module with its worker.

    Raises:
        ConfigError: there is no driver.
    """
    deadline = time.monotonic() + timeout_s
    # torch logs much about a store that is not up yet.
    _connect(env, env.port, deadline).close()
    store = _rendezvous(env).store(max(_RETRY_S, deadline - time.monotonic()))
    with store_errors(env.host, env.port):
        while not store.check([_DRIVER]):
            _wait_to_retry(env, deadline)
        port, token = json.loads(store.get(_DRIVER))
    connection = _connect(env, port, deadline)
    hello = json.dumps([token, str(env.rank), str(os.getpid()), socket.gethostname()])
    connection.sendall(f"{hello}\n".encode())
    run_rank(_pipe_over(connection), env.local_rank, preloaded)


def _wait_for_connection(
    listener: socket.socket, env: LauncherEnv, ranks: Mapping[int, LaunchedRank], deadline: float
) -> None:
    ready = wait([listener, *(rank.pipe for rank in ranks.values())], max(0, deadline - time.monotonic()))
    for number, rank in ranks.items():
        if rank.pipe in ready:
            raise TrainerError(
                f"rank {number} of the trainer ({rank.where}) {rank.exit_reason()}; look at its output."
            )
    if not ready:
        missing = ", ".join(str(number) for number in range(1, env.world_size) if number not in ranks)
        raise ConfigError(
            f"of WORLD_SIZE = {env.world_size} ranks, number {missing} did not come to "
            f"{env.host}:{env.port} in time; start this command once for each, with a RANK of its own."
        )


def _accept(listener: socket.socket, env: LauncherEnv, token: str, ranks: dict[int, LaunchedRank]) -> None:
    connection = listener.accept()[0]
    hello = _hello(connection)
    # Any process may connect; only ranks have the token.
    if not hello or not secrets.compare_digest(hello[0].encode(), token.encode()):
        connection.close()
        return
    number = int(hello[1])
    if number in ranks:
        raise ConfigError(f"two processes have RANK = {number}; give each of them a RANK of its own.")
    if not 0 < number < env.world_size:
        raise ConfigError(
            f"RANK = {number} came to the run of RANK = 0, which has WORLD_SIZE = {env.world_size}; start "
            "all of them with the same settings."
        )
    ranks[number] = LaunchedRank(_pipe_over(connection), int(hello[2]), hello[3])


def _hello(connection: socket.socket) -> list[str]:
    """The four fields of the first line; empty where the line is invalid, or comes too late."""
    line, deadline = b"", time.monotonic() + _HELLO_S
    # A rank sends no more than this line before the driver replies. A stranger may nest JSON to any depth.
    with suppress(OSError, ValueError, RecursionError):
        while not line.endswith(b"\n") and len(line) < _HELLO_BYTES:
            # Raises ValueError when there is no time left.
            connection.settimeout(deadline - time.monotonic())
            line += connection.recv(_HELLO_BYTES) or b"\n"
        fields = json.loads(line)
        return [str(field) for field in fields] if isinstance(fields, list) and len(fields) == 4 else []
    return []


def _rendezvous(env: LauncherEnv) -> Rendezvous:
    return Rendezvous(env.host, env.port, f"agentrl-{env.restart_count}")


def _connect(env: LauncherEnv, port: int, deadline: float) -> socket.socket:
    while True:
        with suppress(OSError):
            connection = socket.create_connection((env.host, port), timeout=_HELLO_S)
            # Without a listener, the kernel may choose that very port for the caller: it connects to itself.
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()
        _wait_to_retry(env, deadline)


def _wait_to_retry(env: LauncherEnv, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise ConfigError(
            f"rank 0 was not at {env.host}:{env.port} (MASTER_ADDR, MASTER_PORT) in time; start this "
            "command there, too, with RANK = 0."
        )
    time.sleep(_RETRY_S)


def _pipe_over(connection: socket.socket) -> Connection:
    connection.setblocking(True)
    for level, option, value in _KEEPALIVE:
        connection.setsockopt(level, option, value)
    return Connection(connection.detach())
