"""Serving an ASGI application: a socket that is bound before anything is loaded, and a clean shutdown."""

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
    """A socket that is bound to an address and does not listen yet. port: 0 = any free port.

    Raises:
        UserError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # TCP is explicit: asyncio sets TCP_NODELAY only on sockets whose protocol is IPPROTO_TCP.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UserError(f"Port {port} of {host} cannot be used: {error.strerror}; choose another.") from error
    return sock


def address_of(sock: socket.socket) -> str:
    """The URL of a server at a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; requests in flight then have 5 s to finish."""
    asyncio.run(_serve(app, listener))


def server_of(app: Starlette) -> uvicorn.Server:
    """A server that ends when `should_exit` is set; the caller handles signals."""
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
    """uvicorn's server without its signal handlers, which raise the signal again after shutdown."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
