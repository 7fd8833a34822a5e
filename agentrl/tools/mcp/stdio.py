"""A server as a subprocess, with JSON-RPC over its pipes: a transport for the SDK's session.

The SDK has one, too. This one differs in what a gym needs: the server gets only the configured environment,
it dies with this process however that ends (see `guard`), a line is bounded, and a line that is no message
fails the pending calls instead of leaving them to their deadline.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client import Transport
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_PARAMS,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)

from agentrl.http.requests import LONG_BYTES, MAX_VALUES, json_of, num_values, off_loop
from agentrl.processes import guard
from agentrl.tools.json_text import storable
from agentrl.tools.mcp.server import ServerCommand
from agentrl.types import JSON

MAX_BYTES = 16 * 2**20
"""The longest message of a server."""
TOO_LONG = f"the answer has more than {MAX_BYTES:,} bytes; ask for less."
TOO_MANY = f"the answer has more than {MAX_VALUES:,} values; ask for less."
EXIT_S = 2.0
"""How long a server may take to end after its stdin was closed."""
_STOP_S = guard.GRACE_S + guard.GIVE_UP_S + 1.0
_CHUNK_BYTES = 2**16
_ENDS_BYTES = 256
_LOG_BYTES = 4096
_LOG_LINES = 5
_LOG_SETTLES_S = 1.0
_POLL_S = 0.002
_MAX_CHARACTERS = 80
_QUEUED = 1024
_TURN_LINES = 64
_ID_FIRST = re.compile(rb'\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)\s*,')
_ID_LAST = re.compile(rb',\s*"id"\s*:\s*(\d+)\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class ServerLog:
    """The end of a server's stderr, for error messages; nothing of it reaches the terminal."""

    def __init__(self) -> None:
        self.has_exited: Callable[[], bool] = lambda: False
        """Whether the process has ended, queried from the kernel: the event loop may learn of it later."""
        self._tail = b""
        self._is_read = False
        self._over = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether the server and all of its child processes have ended."""
        return self._over.is_set() or self.has_exited()

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read until every process that holds the pipe has ended; keep the last bytes."""
        self._is_read = True
        try:
            while chunk := await stream.read(_CHUNK_BYTES):
                self._tail = (self._tail + chunk)[-_LOG_BYTES:]
        finally:
            self._over.set()

    def end(self) -> None:
        """Mark the log as complete."""
        self._over.set()

    async def settled(self) -> None:
        """Wait for the rest of stderr, with a timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOG_SETTLES_S if self._is_read else 0):
                await self._over.wait()

    async def last_lines(self) -> str:
        """The last lines as ` (its last words: ...)`, or an empty text."""
        await self.settled()
        lines = [" ".join(line.split()) for line in self._tail.decode("utf-8", "replace").splitlines()]
        joined = " | ".join([line for line in lines if line][-_LOG_LINES:])
        printable = "".join(c if c.isprintable() else "?" for c in joined)
        return f" (its last words: {printable})" if printable else ""


class Lines:
    """Splits bytes into lines. Of a line that is longer than `max_bytes` only the two ends are kept."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._head: bytes | None = None

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bool]]:
        """The lines that this chunk completes, each with whether its middle was cut out."""
        first, *others = chunk.split(b"\n")
        self._add(first)
        for part in others:
            yield (self._head or b"") + self._line, self._head is not None
            self._line, self._head = bytearray(), None
            self._add(part)

    def _add(self, part: bytes) -> None:
        self._line += part
        if self._head is None and len(self._line) > self._max_bytes:
            self._head = bytes(self._line[:_ENDS_BYTES])
        if self._head is not None:
            self._line = self._line[-_ENDS_BYTES:]


class _PendingCalls:
    """The tool calls without a response, and the messages for the session in each line of the server."""

    def __init__(self) -> None:
        self._pending: set[RequestId] = set()

    def add(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCRequest) and message.method == "tools/call":
            self._pending.add(message.id)
        if isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            self._pending.discard((message.params or {}).get("requestId", ""))

    async def messages_of(self, line: bytes, cut: bool) -> Sequence[JSONRPCMessage]:
        if cut or await off_loop(num_values, line) > MAX_VALUES:
            return self._too_long(line, TOO_LONG if cut else TOO_MANY)
        try:
            message = await _message(line)
        except ValueError:
            # Other text on stdout before or between calls is harmless; during a call it may be its response.
            return self._failed(PARSE_ERROR, f"it wrote {_clipped(line)}, which is no message of MCP")
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            self._pending.discard(message.id)
        return [message]

    def _too_long(self, line: bytes, problem: str) -> Sequence[JSONRPCMessage]:
        match = _ID_FIRST.match(line) or _ID_LAST.search(line[-_ENDS_BYTES:])
        if match and int(match[1]) in self._pending:
            self._pending.discard(int(match[1]))
            return [_error(int(match[1]), INVALID_PARAMS, problem)]
        return self._failed(PARSE_ERROR, f"it wrote a line that is too long: {problem}")

    def _failed(self, code: int, text: str) -> Sequence[JSONRPCMessage]:
        pending, self._pending = self._pending, set()
        return [_error(request, code, text) for request in pending]


async def _message(line: bytes) -> JSONRPCMessage:
    """The message in a line, whose values were counted.

    Raises:
        ValueError: it is none.
    """
    if len(line) <= LONG_BYTES:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    return jsonrpc_message_adapter.validate_python(await off_loop(_value, line), by_name=False)


def _value(line: bytes) -> JSON:
    return storable(json_of(line))


def _error(request: RequestId, code: int, text: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request, error=ErrorData(code=code, message=text))


def _clipped(line: bytes) -> str:
    text = line[: 4 * _MAX_CHARACTERS + 4].decode("utf-8", "replace")
    return repr(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}...")


def stdio(command: ServerCommand, log: ServerLog) -> Transport:
    """Start a server under a guard; leaving the context ends it and all of its child processes.

    Entering raises:
        OSError: the guard cannot be started. A server that cannot be started ends at once.
    """
    return _stdio(command, log)


@asynccontextmanager
async def _stdio(command: ServerCommand, log: ServerLog) -> AsyncIterator[Streams]:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(_CHUNK_BYTES, loop),
        *guard.command([command.path, *command.args]),
        env=dict(command.env),
        cwd=command.cwd,
        start_new_session=True,
    )
    # No await before the `try`: a cancellation there would leave the server running.
    guarded = _Guarded(Process(transport, protocol, loop), transport)
    log.has_exited = guarded.has_exited
    try:
        async with guarded.pumped(log) as streams:
            try:
                yield streams
            finally:
                # The end of the event loop cancels the pump tasks, and they would cancel this.
                with anyio.CancelScope(shield=True):
                    await guarded.stop()
                    await log.settled()
                    log.end()
    finally:
        guarded.release()


class _Guarded:
    """The process of a guard, whose pipes its server inherits."""

    def __init__(self, process: Process, transport: asyncio.SubprocessTransport) -> None:
        self._process = process
        self._transport = transport
        # `process.wait()` would also wait for the pipes, which a child of a server can hold open.
        self._ended = asyncio.Event()
        self._pidfd: int | None = None
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._ended.set()
        else:
            asyncio.get_running_loop().add_reader(self._pidfd, self._ended.set)

    @asynccontextmanager
    async def pumped(self, log: ServerLog) -> AsyncIterator[Streams]:
        """The session's two streams, and tasks that copy lines between them and the pipes."""
        assert self._process.stderr is not None, "started with pipes"
        to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        # Buffered: the cancellation of a call must not wait for a server that does not read its stdin.
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](_QUEUED)
        calls = _PendingCalls()
        async with to_session, from_server, to_server, anyio.create_task_group() as tasks:
            tasks.start_soon(_receive, self._process, to_session, calls)
            tasks.start_soon(_send, self._process, from_session, to_session, calls)
            tasks.start_soon(log.read, self._process.stderr)
            tasks.start_soon(self._watch, to_session, log)
            yield from_server, to_server
            tasks.cancel_scope.cancel()

    async def _watch(
        self, to_session: MemoryObjectSendStream[SessionMessage | Exception], log: ServerLog
    ) -> None:
        """Wait for the guard's end: then the server has ended, even if a child still holds its pipes."""
        await self._ended.wait()
        self._kill_group()
        await log.settled()
        log.end()
        await to_session.aclose()

    async def stop(self) -> None:
        """Close stdin and wait; if it runs on, have the guard end the server and all of its children."""
        assert self._process.stdin is not None, "started with pipes"
        self._process.stdin.close()
        if await self._ends_within(EXIT_S):
            return
        self._terminate()
        await self._ends_within(_STOP_S)

    async def _ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
                # A thread of asyncio reaps it; an earlier waitpid() would take the exit code from asyncio.
                while self._process.returncode is None:
                    await asyncio.sleep(_POLL_S)
        return self._ended.is_set()

    def has_exited(self) -> bool:
        """Whether the guard has ended, queried from the kernel."""
        if self._pidfd is None:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def release(self) -> None:
        """Release all, without an await: where `stop` was interrupted, the guard still ends the server."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._ended.is_set():
            self._kill_group()
            if self._process.returncode is not None:
                self._transport.close()
        else:
            self._terminate()

    def _terminate(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()

    def _kill_group(self) -> None:
        # The guard may have been killed: its server dies with it, but the server's children do not.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def _receive(
    process: Process, to_session: MemoryObjectSendStream[SessionMessage | Exception], calls: _PendingCalls
) -> None:
    """Consumes stdout; waits for the session to take each message; ends with stdout or the session."""
    assert process.stdout is not None, "started with pipes"
    lines, is_open = Lines(), True
    async with to_session:
        while chunk := await process.stdout.read(_CHUNK_BYTES):
            for number, (line, cut) in enumerate(lines.feed(chunk)):
                if number % _TURN_LINES == 0:
                    await asyncio.sleep(0)
                for message in await calls.messages_of(line, cut) if is_open and line.strip() else ():
                    # After the end of the session the rest is read and dropped: a full pipe must not keep
                    # the server from ending.
                    is_open = is_open and await _forward(to_session, message)


async def _forward(
    to_session: MemoryObjectSendStream[SessionMessage | Exception], message: JSONRPCMessage
) -> bool:
    try:
        await to_session.send(SessionMessage(message))
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return False
    return True


async def _send(
    process: Process,
    from_session: MemoryObjectReceiveStream[SessionMessage],
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    calls: _PendingCalls,
) -> None:
    """Consumes the session's messages; waits for stdin to take each; ends with either.

    When the server reads no more messages, the session is closed, too.
    """
    assert process.stdin is not None, "started with pipes"
    async with from_session:
        try:
            async for outgoing in from_session:
                calls.add(outgoing.message)
                text = outgoing.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except OSError:
            await to_session.aclose()
