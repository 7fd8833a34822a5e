"""One session with a server, through the official SDK: it opens, lists and calls, and classifies failures."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import Context

import httpx2
from mcp.client import Client, ClientSession, Transport
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    PARSE_ERROR,
    AudioContent,
    BlobResourceContents,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    Implementation,
    ListToolsResult,
    PaginatedRequestParams,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)
from pydantic import ValidationError

from agentrl.errors import ToolError, ToolRejected
from agentrl.http.guarded import AllowedAddresses
from agentrl.http.requests import MAX_VALUES, ValueCounter
from agentrl.tools.intake import schema_size
from agentrl.tools.mcp.server import Server, ServerCommand
from agentrl.tools.mcp.sieve import MAX_TOOLS, Sieve
from agentrl.tools.mcp.stdio import MAX_BYTES, TOO_LONG, TOO_MANY, ServerLog, stdio
from agentrl.types import JSON

ANSWERS_S = 2.0
"""After a cancelled call, a server that lists its tools within this time counts as healthy."""
CLOSE_S = 8.0
"""The longest time that closing takes: `play` waits ten seconds."""
MAX_TOOLS_SIZE = 50_000
"""Of the descriptions and schemas of all tools of a server together; see `schema_size`."""
_MAX_PAGES = 100
_MAX_SIFTED = 3
_CLIENT_INFO = Implementation(name="agentrl", version="0.1.0")
# Over HTTP the SDK wraps the error for a reply that is too long: by our bound, or by httpx2's.
_TOO_LONG_OVER_HTTP = (TOO_LONG, TOO_MANY, f"exceeded the {MAX_BYTES} byte limit")
# What a broken server or network raises in the SDK; groups come from its tasks.
_BROKEN = (MCPError, ValidationError, TimeoutError, OSError, httpx2.HTTPError, ExceptionGroup)


# The SDK logs errors of servers, with tracebacks; a NullHandler keeps them from the terminal.
for _logger in ("mcp", "client"):
    logging.getLogger(_logger).addHandler(logging.NullHandler())


class McpConnection:
    """An open session; any task of its event loop may call. Create it with `connect`.

    tools: those that the server describes as MCP asks for. refused: why, by the names of the others.
    """

    def __init__(
        self, session: ClientSession, tools: tuple[Tool, ...], refused: Mapping[str, str], log: ServerLog
    ) -> None:
        self.tools, self.refused = tools, refused
        self._session = session
        self._log = log
        self._over = False
        self._probe: asyncio.Task[bool] | None = None

    @property
    def over(self) -> bool:
        """Whether the server is known to have ended."""
        return self._over or self._log.over

    async def stuck(self) -> bool:
        """Whether a call was cancelled and the server has not answered since."""
        if self._probe is not None and await asyncio.shield(self._probe):
            self._probe = None
        return self._probe is not None

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """Call a tool and return its text.

        Cancelling it sends a cancellation to the server, then probes in the background whether it responds.

        Raises:
            ToolRejected: the tool reports an error, or the server rejects the arguments.
            ToolError: `crashed`, the server ended; `protocol`, its response is invalid.
        """
        try:
            # Not its `call_tool`: that evaluates the tool's output schema, without a bound.
            params = CallToolRequestParams(name=name, arguments=dict(arguments))
            result = await self._session.send_request(CallToolRequest(params=params), CallToolResult)
        except asyncio.CancelledError:
            if self._probe is None:
                self._probe = asyncio.get_running_loop().create_task(self._is_healthy(), context=Context())
            raise
        except MCPError as error:
            raise await self._classified(name, error) from error
        except ValidationError as error:
            raise ToolError(
                "protocol", f"`{name}` answered what MCP does not allow: {_line(error)}"
            ) from error
        return await _checked(name, result)

    async def close(self) -> None:
        """Cancel the health probe; the session itself belongs to `connect`."""
        self._over = True
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.wait([self._probe])

    async def _is_healthy(self) -> bool:
        with suppress(MCPError, TimeoutError, ValidationError):
            async with asyncio.timeout(ANSWERS_S):
                await self._session.list_tools()
                return True
        return False

    async def _classified(self, name: str, error: MCPError) -> ToolError | ToolRejected:
        if error.code == INVALID_PARAMS:
            return ToolRejected(f"{name}: {error.message}")
        if words := next((words for words in _TOO_LONG_OVER_HTTP if words in error.message), None):
            return ToolRejected(f"{name}: {TOO_MANY if words == TOO_MANY else TOO_LONG}")
        # A server may respond with the code of the SDK's for a closed connection: then it still answers.
        if error.code == CONNECTION_CLOSED and not await self._is_healthy():
            self._over = True
            lines = await self._log.last_lines()
            return ToolError("crashed", f"the server ended during a call of `{name}`: {_line(error)}{lines}")
        if error.code == PARSE_ERROR:
            return ToolError("protocol", f"in answer to `{name}` {_line(error)}")
        return ToolError("protocol", f"`{name}` failed with JSON-RPC error {error.code}: {_line(error)}")


async def _checked(name: str, result: CallToolResult) -> str:
    # Structured content is the only part whose text may take long.
    text = text_of(result) if result.content else await asyncio.to_thread(text_of, result)
    if result.is_error:
        raise ToolRejected(f"{name} failed and did not say why." if text == NOTHING else text)
    return text


@asynccontextmanager
async def connect(server: Server, *, start_timeout_s: float) -> AsyncIterator[McpConnection]:
    """Open a session and list the server's tools; leaving the context ends the session and the server.

    Entering raises:
        ToolError: `unavailable`, it did not start or respond in time; `protocol`, its responses are not MCP.
    """
    log, sieve, connection = ServerLog(), Sieve(), None
    try:
        async with asyncio.timeout(start_timeout_s) as deadline, AsyncExitStack() as stack:
            client = await stack.enter_async_context(await _client(server, log, sieve, stack))
            tools = await _listed(client.session, sieve)
            connection = McpConnection(client.session, tools, sieve.refused, log)
            deadline.reschedule(None)
            try:
                yield connection
            finally:
                deadline.reschedule(asyncio.get_running_loop().time() + CLOSE_S)
                await connection.close()
    except _BROKEN as error:
        # When an open connection breaks, its calls raise the error; there is nothing to close.
        if connection is None:
            raise await _not_opened(error, log, start_timeout_s) from error


async def _client(server: Server, log: ServerLog, sieve: Sieve, stack: AsyncExitStack) -> Client:
    # "auto": any protocol that the server supports. Only older ones, "legacy", have sessions over HTTP.
    if isinstance(server, ServerCommand):
        return Client(sieve.around(stdio(server, log)), mode="auto", client_info=_CLIENT_INFO, cache=None)
    # No timeout of its own: the deadlines of starting, calling and closing bound every wait.
    http = AllowedAddresses(server.url).client(timeout_s=None, headers=server.headers, max_bytes=None)
    http.event_hooks = {"response": [_bound]}
    await stack.enter_async_context(http)
    transport: Transport = streamable_http_client(server.url, http_client=http, max_sse_event_size=MAX_BYTES)
    mode = "legacy" if server.with_session else "auto"
    return Client(sieve.around(transport), mode=mode, client_info=_CLIENT_INFO, cache=None)


class _Bounded(httpx2.AsyncByteStream):
    """The bytes of a reply, up to the bounds: of an event, where it is a stream of them."""

    def __init__(self, inner: httpx2.AsyncByteStream, *, is_events: bool) -> None:
        self._inner = inner
        self._is_events = is_events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, values = 0, ValueCounter()
        try:
            async for chunk in self._inner:
                if self._is_events and b"\n\n" in chunk.replace(b"\r", b""):
                    size, values = 0, ValueCounter()
                size += len(chunk)
                if size > MAX_BYTES:
                    raise self._error(TOO_LONG)
                if values.add(chunk) > MAX_VALUES:
                    raise self._error(TOO_MANY)
                yield chunk
        except httpx2.DecodingError as error:  # a packed reply
            raise self._error(str(error)) from None

    def _error(self, text: str) -> Exception:
        # The SDK passes on the texts of these two errors, and of no others.
        return httpx2.SSEError(text) if self._is_events else httpx2.StreamError(text)

    async def aclose(self) -> None:
        """Close the inner stream."""
        await self._inner.aclose()


async def _bound(response: httpx2.Response) -> None:
    # A stream of events has no end; its events are bounded one by one.
    is_events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
    if isinstance(response.stream, httpx2.AsyncByteStream):
        response.stream = _Bounded(response.stream, is_events=is_events)


async def _listed(session: ClientSession, sieve: Sieve) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await _page(session, PaginatedRequestParams(cursor=cursor) if cursor else None, sieve)
        tools += page.tools
        await asyncio.to_thread(_check_size, tools)
        cursor = page.next_cursor
        if cursor is None:
            return tuple(tools)
    raise ToolError("protocol", f"the server's list of tools does not end after {_MAX_PAGES} pages")


async def _page(
    session: ClientSession, params: PaginatedRequestParams | None, sieve: Sieve
) -> ListToolsResult:
    """A part of the list, without the tools that are described by what MCP does not allow."""
    for _ in range(_MAX_SIFTED):
        try:
            return await session.list_tools(params=params)
        except ValidationError as error:
            if not sieve.take_out(error):
                raise
    return await session.list_tools(params=params)


def _check_size(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise ToolError("protocol", f"the server lists more than {MAX_TOOLS} tools; use one with fewer")
    sizes = (
        schema_size({"": tool.description, "in": tool.input_schema, "out": tool.output_schema or {}})
        for tool in tools
    )
    if sum(sizes) > MAX_TOOLS_SIZE:
        problem = f"the server's schemas have more than {MAX_TOOLS_SIZE:,} values together"
        raise ToolError("protocol", f"{problem}; use a server that describes less")


async def _not_opened(error: Exception, log: ServerLog, timeout_s: float) -> ToolError:
    cause = _first(error)
    if isinstance(cause, ToolError):
        return cause
    lines = await log.last_lines()
    if isinstance(cause, TimeoutError):
        return ToolError("unavailable", f"the server was not ready within {timeout_s:g} s{lines}")
    if isinstance(cause, ValidationError):
        return ToolError("protocol", f"the server's first answers are not MCP: {_line(cause)}{lines}")
    return ToolError("unavailable", f"the server did not start: {_line(cause)}{lines}")


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _line(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    return " ".join(str(error).split()) or type(error).__name__


NOTHING = "The tool returned nothing."
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def text_of(result: CallToolResult) -> str:
    """The text of all content blocks, joined by newlines; structured content as JSON where there are none.

    A block that is not text becomes a line in brackets that describes it. The text is never empty.
    """
    parts = [_text(block) for block in result.content]
    if not parts and result.structured_content is not None:
        # In steps, between which other threads get their turns.
        parts = ["".join(_ENCODER.iterencode(result.structured_content))]
    return "\n".join(parts) or NOTHING


def _text(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return f"[{block.type} not shown: {block.mime_type}, {_bytes(block.data)}]"
        case ResourceLink():
            return f"[resource not shown: {block.name}, {block.uri}]"
        case EmbeddedResource():
            return f"[resource not shown: {block.resource.uri}, {_size(block.resource)}]"


def _size(resource: TextResourceContents | BlobResourceContents) -> str:
    if isinstance(resource, TextResourceContents):
        return f"{len(resource.text):,} characters"
    return _bytes(resource.blob)


def _bytes(base64_text: str) -> str:
    padding = len(base64_text) - len(base64_text.rstrip("="))
    return f"{len(base64_text) * 3 // 4 - padding:,} bytes"
