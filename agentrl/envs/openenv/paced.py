"""A WebSocket that one client cannot hold the event loop with."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

_PART_BYTES = 1 << 13


@lru_cache(maxsize=1)
def paced_socket() -> type[asyncio.Protocol]:
    """A WebSocket that takes what arrives in parts, between which other tasks get their turns.

    Pings are answered where they arrive: 256 KiB of them, which asyncio hands over at once, would hold the
    event loop for a second. While a client does not read the answers, nothing of it is read.
    """
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    class Paced(WebSocketsSansIOProtocol):
        """See `asyncio.Protocol`."""

        _rest = b""

        def data_received(self, data: bytes) -> None:
            is_waiting, self._rest = bool(self._rest), self._rest + data
            if is_waiting:
                self.transport.pause_reading()
            else:
                self._go_on()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._rest:
                self._go_on()

        async def send(self, message: ASGISendEvent) -> None:
            await super().send(message)
            # A handshake that is refused is answered, which uvicorn takes for an error of the application.
            self.handshake_complete = self.handshake_complete or self.initial_response is not None

        def _go_on(self) -> None:
            if not self.writable.is_set() or self.transport.is_closing():
                # `resume_writing` goes on.
                self.transport.pause_reading()
                return
            part, self._rest = self._rest[:_PART_BYTES], self._rest[_PART_BYTES:]
            super().data_received(part)
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                # uvicorn neither answers nor closes what websockets takes for no handshake.
                self.transport.write(b"".join(self.conn.data_to_send()))
                self.transport.close()
                return
            if self._rest:
                self.transport.pause_reading()
                self.loop.call_soon(self._go_on)
            elif not self.read_paused:
                self.transport.resume_reading()

    return Paced
