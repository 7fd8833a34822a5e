"""A server as a process of its own, spoken to over its pipes: a transport for the SDK's session.

The SDK has one too. This one differs in what a gym needs: the server gets the environment that was given and
no more, it dies with us whatever happens to us (see `guard`), a line is bounded, and a line that is no
message fails the calls that are waiting instead of leaving them to their deadline.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import AsyncIterator, Callable, Iterator
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
from pydantic import ValidationError

from agentrl import guard
from agentrl.tools.mcp.server import Command

MAX_BYTES = 16 * 2**20
"""Of one message of a server."""
TOO_LONG = f"the answer has more than {MAX_BYTES:,} bytes; ask for less."
EXIT_S = 2.0
"""How long a server may take to end after its stdin was closed."""
_STOP_S = guard.GRACE_S + guard.GIVE_UP_S + 1.0
_CHUNK_BYTES = 2**16
_ENDS_BYTES = 256
_LOG_BYTES = 4096
_LOG_LINES = 5
_LOG_SETTLES_S = 1.0
_LOOK_AGAIN_S = 0.002
_SHOWN_CHARACTERS = 80
_QUEUED = 1024
_ID_FIRST = re.compile(rb'\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d+)\s*,')
_ID_LAST = re.compile(rb',\s*"id"\s*:\s*(\d+)\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class ServerLog:
    """The last words of a server on its stderr, for error messages; nothing of it reaches our terminal."""

    def __init__(self) -> None:
        self.gone: Callable[[], bool] = lambda: False
        """Asks the kernel whether the process has ended, which the event loop may not have heard of yet."""
        self._kept = b""
        self._read = False
        self._over = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether the server and all it started are gone."""
        return self._over.is_set() or self.gone()

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Keep what comes until all who could write are gone."""
        self._read = True
        try:
            while chunk := await stream.read(_CHUNK_BYTES):
                self._kept = (self._kept + chunk)[-_LOG_BYTES:]
        finally:
            self._over.set()

    def end(self) -> None:
        """Nothing that counts comes any more."""
        self._over.set()

    async def settled(self) -> None:
        """What was said before the end has a moment to come in."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOG_SETTLES_S if self._read else 0):
                await self._over.wait()

    async def last_words(self) -> str:
        """The last lines as ` (its last words: ...)`, or nothing."""
        await self.settled()
        lines = [" ".join(line.split()) for line in self._kept.decode("utf-8", "replace").splitlines()]
        said = " | ".join([line for line in lines if line][-_LOG_LINES:])
        printable = "".join(c if c.isprintable() else "?" for c in said)
        return f" (its last words: {printable})" if printable else ""


class Lines:
    """Cuts bytes into lines. Of a line that is longer than `most` only the two ends are kept."""

    def __init__(self, most: int = MAX_BYTES) -> None:
        self._most = most
        self._line = bytearray()
        self._head: bytes | None = None

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bool]]:
        """The lines that are whole now, each with whether its middle was left out."""
        first, *others = chunk.split(b"\n")
        self._add(first)
        for part in others:
            yield (self._head or b"") + self._line, self._head is not None
            self._line, self._head = bytearray(), None
            self._add(part)

    def _add(self, part: bytes) -> None:
        self._line += part
        if self._head is None and len(self._line) > self._most:
            self._head = bytes(self._line[:_ENDS_BYTES])
        if self._head is not None:
            self._line = self._line[-_ENDS_BYTES:]


class _Calls:
    """The calls that wait for an answer, and what each line of the server says to them."""

    def __init__(self) -> None:
        self._waiting: set[RequestId] = set()

    def sent(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCRequest) and message.method == "tools/call":
            self._waiting.add(message.id)
        if isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            self._waiting.discard((message.params or {}).get("requestId", ""))

    def heard(self, line: bytes, cut: bool) -> Iterator[JSONRPCMessage]:
        if cut:
            yield from self._too_long(line)
            return
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValidationError:
            # Words on stdout before or between calls do no harm; within one they may be its answer.
            yield from self._failed(PARSE_ERROR, f"it wrote {_shown(line)}, which is no message of MCP")
            return
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            self._waiting.discard(message.id)
        yield message

    def _too_long(self, line: bytes) -> Iterator[JSONRPCMessage]:
        found = _ID_FIRST.match(line) or _ID_LAST.search(line)
        if found and int(found[1]) in self._waiting:
            self._waiting.discard(int(found[1]))
            yield _error(int(found[1]), INVALID_PARAMS, TOO_LONG)
        else:
            yield from self._failed(PARSE_ERROR, f"it wrote a line of more than {MAX_BYTES:,} bytes")

    def _failed(self, code: int, text: str) -> Iterator[JSONRPCMessage]:
        waiting, self._waiting = self._waiting, set()
        return (_error(one, code, text) for one in waiting)


def _error(request: RequestId, code: int, text: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request, error=ErrorData(code=code, message=text))


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")


def stdio(command: Command, log: ServerLog) -> Transport:
    """Start a server under guard; on leaving, it and whatever it started are gone.

    Entering raises:
        OSError: the guard cannot be started. A server that cannot is one that ends at once.
    """
    return _stdio(command, log)


@asynccontextmanager
async def _stdio(command: Command, log: ServerLog) -> AsyncIterator[Streams]:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(_CHUNK_BYTES, loop),
        *guard.command([command.path, *command.args]),
        env=dict(command.env),
        cwd=command.cwd,
        start_new_session=True,
    )
    # No await before the `try`: a cancellation there would leave the server to itself.
    guarded = _Guarded(Process(transport, protocol, loop), transport)
    log.gone = guarded.gone
    try:
        async with guarded.pumped(log) as streams:
            try:
                yield streams
            finally:
                # The end of the event loop cancels the tasks that carry lines, and they would cancel this.
                with anyio.CancelScope(shield=True):
                    await guarded.stop()
                    await log.settled()
                    log.end()
    finally:
        guarded.let_go()


class _Guarded:
    """The process of a guard, whose pipes are those of its server."""

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
        """The session's two streams, and tasks that carry lines between them and the pipes."""
        assert self._process.stderr is not None, "started with pipes"
        to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        # With room: that a call is cancelled must not wait until a server that hangs reads its stdin.
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](_QUEUED)
        calls = _Calls()
        async with to_session, from_server, to_server, anyio.create_task_group() as tasks:
            tasks.start_soon(_hear, self._process, to_session, calls)
            tasks.start_soon(_tell, self._process, from_session, to_session, calls)
            tasks.start_soon(log.read, self._process.stderr)
            tasks.start_soon(self._watch, to_session, log)
            yield from_server, to_server
            tasks.cancel_scope.cancel()

    async def _watch(
        self, to_session: MemoryObjectSendStream[SessionMessage | Exception], log: ServerLog
    ) -> None:
        """Waits for the guard's end: then the server is gone, whoever still holds its pipes."""
        await self._ended.wait()
        self._kill_group()
        await log.settled()
        log.end()
        await to_session.aclose()

    async def stop(self) -> None:
        """Close stdin, wait, have the guard end the server and all it started, wait."""
        assert self._process.stdin is not None, "started with pipes"
        self._process.stdin.close()
        if await self._ends_within(EXIT_S):
            return
        self._ask_to_end()
        await self._ends_within(_STOP_S)

    async def _ends_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
                # A thread of asyncio's reaps it; who looks before that takes the exit code away from it.
                while self._process.returncode is None:
                    await asyncio.sleep(_LOOK_AGAIN_S)
        return self._ended.is_set()

    def gone(self) -> bool:
        """Whether the guard has ended, asked of the kernel."""
        if self._pidfd is None:
            return True
        look = select.poll()
        look.register(self._pidfd, select.POLLIN)
        return bool(look.poll(0))

    def let_go(self) -> None:
        """The last word, without an await: where `stop` was interrupted, the guard ends its work alone."""
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._ended.is_set():
            self._kill_group()
            if self._process.returncode is not None:
                self._transport.close()
        else:
            self._ask_to_end()

    def _ask_to_end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()

    def _kill_group(self) -> None:
        # Somebody may have killed the guard: its server has gone with it, children of that have not.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def _hear(
    process: Process, to_session: MemoryObjectSendStream[SessionMessage | Exception], calls: _Calls
) -> None:
    """Consumes stdout; waits for the session to take each message; ends with stdout or the session."""
    assert process.stdout is not None, "started with pipes"
    lines, told = Lines(), True
    async with to_session:
        while chunk := await process.stdout.read(_CHUNK_BYTES):
            for line, cut in lines.feed(chunk):
                for message in calls.heard(line, cut) if told and line.strip() else ():
                    # Where the session is gone the rest is read and dropped: a full pipe must not keep
                    # the server from ending.
                    told = told and await _given(to_session, message)


async def _given(
    to_session: MemoryObjectSendStream[SessionMessage | Exception], message: JSONRPCMessage
) -> bool:
    try:
        await to_session.send(SessionMessage(message))
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return False
    return True


async def _tell(
    process: Process,
    from_session: MemoryObjectReceiveStream[SessionMessage],
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    calls: _Calls,
) -> None:
    """Consumes the session's messages; waits for stdin to take each; ends with either.

    A server that takes no more messages is over for the session, too.
    """
    assert process.stdin is not None, "started with pipes"
    async with from_session:
        try:
            async for one in from_session:
                calls.sent(one.message)
                text = one.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except OSError:
            await to_session.aclose()
