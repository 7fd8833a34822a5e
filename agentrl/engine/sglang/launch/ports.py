"""Ports for servers that are started again at the same one."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

from agentrl.errors import EngineUnavailableError

HOST = "127.0.0.1"
ABOVE = 10_000
"""SGLang keeps the port this much above its own for itself."""
# Below those that the kernel gives to outgoing connections, also with ABOVE added: a server that is started
# again finds its port free.
_FIRST, _LAST = 12_000, 22_000
_TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Different ports that are free now, each with the one ABOVE it.

    Raises:
        EngineUnavailableError: there are none.
    """
    found: list[int] = []
    # Held until all are found, so that they differ.
    with ExitStack() as held:
        for port in random.sample(range(_FIRST, _LAST), _TRIES):
            if len(found) == count:
                return found
            try:
                with ExitStack() as both:
                    both.enter_context(_bound(port))
                    both.enter_context(_bound(port + ABOVE))
                    held.push(both.pop_all())
            except OSError:
                continue
            found.append(port)
    raise EngineUnavailableError(f"{count} ports of {HOST} between {_FIRST} and {_LAST} are not free.")


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        with _bound(port):
            return True
    except OSError:
        return False


def _bound(port: int) -> socket.socket:
    holder = socket.socket()
    try:
        # As servers do: connections that have just ended don't keep a port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, port))
    except OSError:
        holder.close()
        raise
    return holder
