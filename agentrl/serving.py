"""Serving an ASGI application: a socket that is bound before anything is loaded, and a clean end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from agentrl.errors import UserError

if TYPE_CHECKING:
    from starlette.applications import Starlette

WAITING_CONNECTIONS = 2048
_LAST_REQUESTS_S = 5


def bound(host: str, port: int) -> socket.socket:
    """A socket that holds an address and takes no connections yet. port: 0 = any that is free.

    Raises:
        UserError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP by name: asyncio turns Nagle's delay off only for sockets that say so.
    holder = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, port))
    except OSError as error:
        holder.close()
        raise UserError(f"Port {port} of {host} cannot be used: {error.strerror}; choose another.") from error
    return holder


def address_of(holder: socket.socket) -> str:
    """Where clients find what serves at a socket."""
    host, port = holder.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; requests that are in flight then are still answered, for 5 s."""
    asyncio.run(_serve(app, listener))


def server_of(app: Starlette) -> uvicorn.Server:
    """A server that ends when `should_exit` is set; it leaves signals to the caller."""
    return _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_LAST_REQUESTS_S,
        )
    )


async def _serve(app: Starlette, listener: socket.socket) -> None:
    server = server_of(app)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's, but it ends when it is told to, instead of killing itself with the signal afterwards."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
