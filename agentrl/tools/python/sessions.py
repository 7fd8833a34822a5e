"""Sessions, seen from the host: code goes in, results come out, and closing one ends all that is in it."""

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
_GRACE_S = 30.0  # a supervisor among hundreds of busy processes is late, not dead
_END_S = 2.0
NOBODY = 65534
"""Who runs code where we are root."""
_CHUNK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class PythonResult:
    """What a piece of code did.

    output: what it printed, bounded. dropped_bytes: how much more it printed.
    outcome: `done`; `error` (an exception, or an exit code); `signal` (it crashed); `ended` (it left without
        a word); or the limit that it broke: `timeout`, `cpu`, `memory`, `processes`.
    detail: the signal, or the exit code.
    cpu_s: CPU seconds that it took, those of its children included.
    over: the session has ended with it: variables are gone.
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


_ANSWER: TypeAdapter[PythonResult | _Refusal] = TypeAdapter(PythonResult | _Refusal)


class PythonSession:
    """One session. Its code is run one piece after another.

    Waits for: the supervisor's answers. Unblocked by: the limits, which the supervisor keeps; its death.
    On cancellation: close() it, as `async with` does; everything in it is then dead.
    """

    def __init__(self, host: socket.socket, limits: SessionLimits, *, greeting: bytes = b"") -> None:
        self._socket = host
        self._limits = limits
        self._untold = greeting + pack(limits)

    async def __aenter__(self) -> PythonSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str) -> PythonResult:
        """Run a piece of code to its end, or to a limit.

        Raises:
            ToolError: the sandbox died, or cannot start a session.
        """
        message, self._untold = self._untold + pack(code), b""
        try:
            async with asyncio.timeout(self._limits["wall_s"] + _GRACE_S):
                with suppress(BrokenPipeError):  # its last message says why it is gone
                    await asyncio.get_running_loop().sock_sendall(self._socket, message)
                answer = await self._answer()
        except TimeoutError:
            raise ToolError("crashed", "the sandbox does not answer") from None
        except (OSError, EOFError) as error:
            raise ToolError("crashed", f"the sandbox died: {error or type(error).__name__}") from None
        except ValueError as error:
            raise ToolError("protocol", f"the sandbox answered nonsense: {error}") from None
        if isinstance(answer, _Refusal):
            raise ToolError("unavailable", f"the sandbox cannot start a session: {answer.detail}")
        return answer

    async def close(self) -> None:
        """End it, and wait until everything in it is dead. Closing twice is fine."""
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

    async def _answer(self) -> PythonResult | _Refusal:
        length: int = _LENGTH.unpack(await self._exactly(_LENGTH.size))[0]
        if length > MOST_BYTES:
            raise ValueError(f"an answer of {length} bytes")
        return _ANSWER.validate_json(await self._exactly(length))

    async def _exactly(self, number: int) -> bytes:
        data = bytearray()
        while len(data) < number:
            part = await asyncio.get_running_loop().sock_recv(self._socket, number - len(data))
            if not part:
                raise EOFError("its socket is closed")
            data += part
        return bytes(data)


class Backend(ABC):
    """Where sessions come from."""

    @abstractmethod
    async def session(self, limits: SessionLimits) -> PythonSession:
        """A new session, to be entered with `async with`.

        Raises:
            ToolError: the sandbox is dead.
        """
