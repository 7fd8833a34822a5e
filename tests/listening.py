"""An ASGI application behind a real socket of the loopback device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.http.serving import address_of, bound, server_of


@asynccontextmanager
async def listening(app, port: int = 0, websocket=None) -> AsyncIterator[str]:
    """Serve an ASGI application on a port of the loopback device, 0 = a free one; yields its address."""
    with bound("127.0.0.1", port) as holder:
        holder.listen()
        server = server_of(app, websocket=websocket)
        task = asyncio.create_task(server.serve(sockets=[holder]))
        while not server.started:
            await asyncio.sleep(0.001)
        try:
            yield address_of(holder)
        finally:
            server.should_exit = True
            await task
