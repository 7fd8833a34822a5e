"""What a server's results pass through before the SDK checks them: surplus parts and bad tools are left out.

The SDK checks a result on the event loop, each part of it against each form that MCP allows, and lists all
errors: 90,000 bad parts hold the loop for eight seconds. So lists are cut before it sees them.

It refuses a list of tools as a whole, too, and names the place of the tool in it. So its error tells which
tools to take out, and the list is asked for again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mcp.client import Transport
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCResponse
from pydantic import ValidationError

from agentrl.types import JSON

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, TransportStreams

MAX_TOOLS = 256
MAX_BLOCKS = 1_000
_TOOLS, _CONTENT = "tools", "content"


class Sieve:
    """What a session's results pass through. Of a list of tools, one more than 256 is left; of the parts of a
    result 1,000, and a sentence that says how many are not shown.

    refused: why, by the name of each tool that was taken out, or by its number where it has no name.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._out: set[str] = set()
        self._listed: list[JSON] = []

    @asynccontextmanager
    async def around(self, transport: Transport) -> AsyncIterator[TransportStreams]:
        """The transport, whose results are sifted."""
        async with transport as (read, write):
            yield _Sifted(read, self._sift), write

    def take_out(self, error: ValidationError) -> bool:
        """Take the tools that an error is about out of all lists to come; whether there are any.

        error: the SDK's, about the last list.
        """
        found: dict[int, str] = {}
        for problem in error.errors(include_url=False):
            match problem["loc"]:
                case (str(root), int(number), *within) if root == _TOOLS and number < len(self._listed):
                    where, what = ".".join(map(str, within)), problem["msg"].lower()
                    found.setdefault(number, f"{where}: {what}" if where else what)
        for number, reason in found.items():
            tool = self._listed[number]
            name = tool.get("name") if isinstance(tool, dict) else None
            self.refused[name if isinstance(name, str) and name else f"number {number + 1}"] = reason
            self._out.add(_key(tool))
        return bool(found)

    def _sift(self, message: SessionMessage | Exception) -> None:
        if isinstance(message, Exception) or not isinstance(message.message, JSONRPCResponse):
            return
        result = message.message.result
        content, listed = result.get(_CONTENT), result.get(_TOOLS)
        if isinstance(content, list) and len(content) > MAX_BLOCKS:
            rest = {"type": "text", "text": f"[{len(content) - MAX_BLOCKS:,} more parts not shown]"}
            result[_CONTENT] = [*content[:MAX_BLOCKS], rest]
        if isinstance(listed, list):
            few = listed[: MAX_TOOLS + 1]
            self._listed = [tool for tool in few if not self._out or _key(tool) not in self._out]
            result[_TOOLS] = self._listed


def _key(tool: JSON) -> str:
    return json.dumps(tool, sort_keys=True)


class _Sifted:
    """A stream whose messages are seen, and may be changed, before they are received."""

    def __init__(
        self,
        inner: ReadStream[SessionMessage | Exception],
        see: Callable[[SessionMessage | Exception], None],
    ) -> None:
        self._inner, self._see = inner, see

    @property
    def last_context(self) -> object:
        """That of the stream, which the SDK asks for."""
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        """The next message."""
        message = await self._inner.receive()
        self._see(message)
        return message

    async def aclose(self) -> None:
        """Close the stream."""
        await self._inner.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        message = await self._inner.__anext__()
        self._see(message)
        return message

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, trace)
