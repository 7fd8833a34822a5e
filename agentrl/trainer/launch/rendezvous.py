"""The rendezvous: a key-value store that all ranks read and write.

A store of torch behind a port has no key: whoever reaches the port may set any name, to gigabytes. So
ranks on the driver's machine share a file in memory, which the kernel opens only to this user.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import NamedTuple

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from agentrl.errors import ConfigError, UserError
from agentrl.http.serving import WAITING_CONNECTIONS, bound
from agentrl.processes.interfaces import is_loopback
from agentrl.weights.shared import SharedFile

_TIMEOUT_S = 600.0
_HOST_TIMEOUT_S = 30.0
_ANY_NUMBER = -1


class Rendezvous(NamedTuple):
    """Where the ranks find their store.

    host: an address of the driver's machine; a loopback address = all ranks are there.
    place: the path of the store's file, or its port at `host`.
    plan: the number of the ranks' plan. Each has names of its own: a rank would take the addresses that the
        others had under the plan before for those that they have now.
    """

    host: str
    place: str | int
    plan: int = 0

    def store(self, timeout_s: float = _TIMEOUT_S) -> Store:
        """Open the store. timeout_s: for a connection, and for each operation on the store.

        Raises:
            ConfigError: no store is there.
        """
        store = (
            _opened(self.place)
            if isinstance(self.place, str)
            else _connected(self.host, self.place, timeout_s)
        )
        store.set_timeout(timedelta(seconds=timeout_s))
        return PrefixStore(f"plan-{self.plan}", store)


class RankStore:
    """The store of a group of ranks, for as long as this object exists.

    host: a loopback address, or one at which other machines reach this one; it listens at that one alone.

    Raises:
        UserError: the host is not this machine.
    """

    def __init__(self, host: str) -> None:
        self._held: SharedFile | TCPStore
        if is_loopback(host):
            # It has no name, and other users may not follow the links in /proc of this one. So nobody else
            # opens it, and the kernel frees it with this process.
            file = SharedFile(os.memfd_create("agentrl-rendezvous"))
            self._held = file
            self.rendezvous = Rendezvous(host, file.path)
        else:
            server = host_store(host, 0)
            self._held = server
            self.rendezvous = Rendezvous(host, server.port)


def _opened(path: str) -> Store:
    # torch waits for a file that is missing.
    if not os.access(path, os.R_OK | os.W_OK):
        raise ConfigError(
            f"the store of the ranks ({path}) is gone, or of another user; start all ranks of a run on its "
            "machine as its user."
        )
    return FileStore(path, _ANY_NUMBER)


def _connected(host: str, port: int, timeout_s: float) -> Store:
    store: Future[Store] = Future()

    def connect() -> None:
        timeout = timedelta(seconds=timeout_s)
        with _store_errors_to(store):
            store.set_result(TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False))

    # torch has no timeout for a peer that accepts the connection and never replies.
    Thread(target=connect, daemon=True).start()
    with store_errors(host, port):
        return store.result(2 * timeout_s)


def host_store(host: str, port: int) -> TCPStore:
    """Host a store, for as long as the returned object exists. port: 0 = any free one.

    Raises:
        UserError: the port cannot be used, or the host is not this machine.
    """
    with listening_socket(host, port) as listener, store_errors(host, port):
        return TCPStore(
            host,
            int(listener.getsockname()[1]),
            is_master=True,
            # It connects to itself, at once.
            timeout=timedelta(seconds=_HOST_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


@contextmanager
def store_errors(host: str, port: int) -> Iterator[None]:
    """Replace torch's errors about an unreachable store with one sentence.

    Raises:
        ConfigError: no store answers at the address.
    """
    try:
        yield
    except (DistError, TimeoutError) as error:
        raise ConfigError(
            f"no store of the ranks answers at {host}:{port}; every machine of the ranks has to reach that "
            "address of the run's machine: open it, or give Ray another with --node-ip-address."
        ) from error


@contextmanager
def _store_errors_to(future: Future[Store]) -> Iterator[None]:
    try:
        yield
    except DistError as error:
        future.set_exception(error)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket for clients that reach this machine as `host`, at that address alone.

    Raises:
        UserError: the port cannot be used.
    """
    try:
        listener = bound(host, port)
    except UserError as error:
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRNOTAVAIL:
            raise
        # The network translates it to an address of this machine, and which one is not known here.
        listener = bound("::" if ":" in host else "0.0.0.0", port)
    listener.listen(WAITING_CONNECTIONS)
    return listener
