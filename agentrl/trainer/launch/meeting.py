"""The store where ranks find each other."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from agentrl.errors import ConfigError
from agentrl.serving import WAITING_CONNECTIONS, bound
from agentrl.trainer.launch.seats import is_loopback

_PATIENCE_S = 600.0
_HERE_S = 30.0


class Meeting(NamedTuple):
    """Its address, and what keeps its keys apart from those of others."""

    host: str
    port: int
    prefix: str

    def store(self, patience_s: float = _PATIENCE_S) -> Store:
        """As whoever does not keep it sees it. patience_s: until it is there, and for all that it is asked.

        Raises:
            ConfigError: it is not.
        """
        found: Future[Store] = Future()

        def look() -> None:
            timeout = timedelta(seconds=patience_s)
            with _into(found):
                found.set_result(
                    TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)
                )

        # torch has no patience of its own with something that takes the call and says nothing.
        Thread(target=look, daemon=True).start()
        with found_by(self.host, self.port):
            return PrefixStore(self.prefix, found.result(2 * patience_s))


def kept(host: str, port: int) -> TCPStore:
    """Keep a store, for as long as what this returns is kept. port: 0 = any that is free.

    Raises:
        UserError: the port cannot be used, or the host is not this machine.
    """
    with listening(host, port) as holder, found_by(host, port):
        return TCPStore(
            host,
            int(holder.getsockname()[1]),
            is_master=True,
            # It looks for itself, at once.
            timeout=timedelta(seconds=_HERE_S),
            wait_for_workers=False,
            master_listen_fd=holder.detach(),
        )


@contextmanager
def found_by(host: str, port: int) -> Iterator[None]:
    """Turn what torch says of a store that is not there into a sentence.

    Raises:
        ConfigError: that sentence.
    """
    try:
        yield
    except (DistError, TimeoutError) as error:
        raise ConfigError(
            f"no store of rank 0 answers at {host}:{port} (MASTER_ADDR, MASTER_PORT); both must lead to the "
            "machine of RANK = 0, and be the same for all ranks."
        ) from error


@contextmanager
def _into(future: Future[Store]) -> Iterator[None]:
    try:
        yield
    except DistError as error:
        future.set_exception(error)


def listening(host: str, port: int) -> socket.socket:
    """A socket that those who know this machine as `host` can connect to; at a loopback address, no others.

    Raises:
        UserError: the port cannot be used.
    """
    everywhere = "::" if ":" in host else "0.0.0.0"
    holder = bound(host if is_loopback(host) else everywhere, port)
    holder.listen(WAITING_CONNECTIONS)
    return holder
