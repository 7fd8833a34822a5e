"""The store where ranks find each other."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from agentrl.serving import WAITING_CONNECTIONS, bound
from agentrl.trainer.megatron.launch.seats import is_loopback

_TIMEOUT = timedelta(seconds=600)


class Meeting(NamedTuple):
    """Its address, and what keeps its keys apart from those of others."""

    host: str
    port: int
    prefix: str

    def store(self) -> Store:
        """As whoever does not keep it sees it."""
        store = TCPStore(self.host, self.port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
        return PrefixStore(self.prefix, store)


def kept(host: str, port: int) -> TCPStore:
    """Keep a store, for as long as what this returns is kept. port: 0 = any that is free.

    Raises:
        UserError: the port cannot be used.
    """
    with listening(host, port) as holder:
        return TCPStore(
            host,
            int(holder.getsockname()[1]),
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=holder.detach(),
        )


def listening(host: str, port: int) -> socket.socket:
    """A socket that those who know this machine as `host` can connect to; at a loopback address, no others.

    Raises:
        UserError: the port cannot be used.
    """
    everywhere = "::" if ":" in host else "0.0.0.0"
    holder = bound(host if is_loopback(host) else everywhere, port)
    holder.listen(WAITING_CONNECTIONS)
    return holder
