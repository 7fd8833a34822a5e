"""The rendezvous: a key-value store that all ranks connect to."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from agentrl.errors import ConfigError, UserError
from agentrl.serving import WAITING_CONNECTIONS, bound

_TIMEOUT_S = 600.0
_HOST_TIMEOUT_S = 30.0


class Rendezvous(NamedTuple):
    """The address of the store, and the prefix of this trainer's keys."""

    host: str
    port: int
    prefix: str

    def store(self, timeout_s: float = _TIMEOUT_S) -> Store:
        """Connect to the store. timeout_s: for the connection, and for each operation on the store.

        Raises:
            ConfigError: no store is at the address.
        """
        store: Future[Store] = Future()

        def connect() -> None:
            timeout = timedelta(seconds=timeout_s)
            with _store_errors_to(store):
                store.set_result(
                    TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)
                )

        # torch has no timeout for a peer that accepts the connection and never replies.
        Thread(target=connect, daemon=True).start()
        with store_errors(self.host, self.port):
            return PrefixStore(self.prefix, store.result(2 * timeout_s))


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
