"""The host's side of a session: it sends code, receives results, and ends all processes when it closes."""

from __future__ import annotations

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from agentrl.errors import ToolError
from agentrl.tools.python.inside.wire import MOST_BYTES, SessionLimits, pack

_LENGTH = struct.Struct("!I")
_GRACE_S = 30.0  # a supervisor among hundreds of busy processes may respond late
_END_S = 2.0
NOBODY = 65534
"""The user id that runs code where the host runs as root."""
_CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class PythonResult:
    """The result of a piece of code.

    output: what it printed, bounded. dropped_bytes: how much more it printed.
    outcome: `done`; `error` (an exception, or an exit code); `signal` (it crashed); `ended` (it exited
        without a report); or the limit that it exceeded: `timeout`, `cpu`, `memory`, `processes`.
    detail: the signal, the exit code, or what took the memory.
    cpu_s: CPU seconds of the code and its child processes.
    over: the session ended with it: its variables are lost.
    """

    output: str
    outcome: str
    detail: str
    dropped_bytes: int
    cpu_s: float
    over: bool


@dataclass(frozen=True, slots=True)
class _Refusal:
    outcome: Literal["unavailable"]
    detail: str


_REPLY: TypeAdapter[PythonResult | _Refusal] = TypeAdapter(PythonResult | _Refusal)


class PythonSession:
    """One session. Its code is run one piece after another.

    Waits for: the supervisor's replies. Unblocked by: the limits, which the supervisor enforces; its death.
    On cancellation: close() it, as `async with` does; all of its processes are then dead.
    """

    def __init__(self, host: socket.socket, limits: SessionLimits, *, greeting: bytes = b"") -> None:
        self._socket = host
        self._limits = limits
        self._unsent = greeting + pack(limits)

    async def __aenter__(self) -> PythonSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str) -> PythonResult:
        """Run a piece of code to its end, or to a limit.

        Raises:
            ToolError: the sandbox died, or cannot start a session.
        """
        message, self._unsent = self._unsent + pack(code), b""
        try:
            async with asyncio.timeout(self._limits["wall_s"] + _GRACE_S):
                with suppress(BrokenPipeError):  # its last message holds the reason
                    await asyncio.get_running_loop().sock_sendall(self._socket, message)
                reply = await self._reply()
        except TimeoutError:
            raise ToolError("crashed", "the sandbox does not answer") from None
        except (OSError, EOFError) as error:
            raise ToolError("crashed", f"the sandbox died: {error or type(error).__name__}") from None
        except ValueError as error:
            raise ToolError("protocol", f"the sandbox answered nonsense: {error}") from None
        if isinstance(reply, _Refusal):
            raise ToolError("unavailable", f"the sandbox cannot start a session: {reply.detail}")
        return reply

    async def listener(self) -> socket.socket:
        """The socket to which its code may connect. It listens in the session's own network; call it once.

        Raises:
            ToolError: the sandbox died, or cannot start a session.
        """
        message, self._unsent = self._unsent, b""
        try:
            async with asyncio.timeout(_GRACE_S):
                await asyncio.get_running_loop().sock_sendall(self._socket, message)
                await _readable(self._socket)
                data, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        except (OSError, TimeoutError) as error:
            raise ToolError("crashed", f"the sandbox died: {error or type(error).__name__}") from None
        if not fds:
            raise ToolError("unavailable", f"the sandbox has no network: {data!r}")
        return socket.socket(fileno=fds[0])

    async def close(self) -> None:
        """End it, and wait until all of its processes are dead. Closing twice is fine."""
        try:
            async with asyncio.timeout(_END_S):
                self._socket.shutdown(socket.SHUT_WR)
                # The supervisor's end of the socket closes after the last process of the session.
                while await asyncio.get_running_loop().sock_recv(self._socket, _CHUNK_BYTES):
                    pass
        except (OSError, TimeoutError):
            return
        finally:
            self._socket.close()

    async def _reply(self) -> PythonResult | _Refusal:
        length: int = _LENGTH.unpack(await self._exactly(_LENGTH.size))[0]
        if length > MOST_BYTES:
            raise ValueError(f"an answer of {length} bytes")
        return _REPLY.validate_json(await self._exactly(length))

    async def _exactly(self, number: int) -> bytes:
        data = bytearray()
        while len(data) < number:
            part = await asyncio.get_running_loop().sock_recv(self._socket, number - len(data))
            if not part:
                raise EOFError("its socket is closed")
            data += part
        return bytes(data)


async def _readable(sock: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


class Backend(ABC):
    """Creates sessions."""

    @abstractmethod
    async def session(self, limits: SessionLimits) -> PythonSession:
        """A new session, to be entered with `async with`.

        Raises:
            ToolError: the sandbox is dead.
        """
