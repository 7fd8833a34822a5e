"""`McpTools`: the tools of any MCP server, for the episodes of an environment."""

from __future__ import annotations

import asyncio
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.errors import ToolDefinitionError, ToolError, UserError, did_you_mean
from agentrl.runtime.clocks import clocks_stopped
from agentrl.runtime.extras import require
from agentrl.runtime.gate import Gate
from agentrl.tools.base import Tool
from agentrl.tools.mcp.server import Server, address, command, with_variables
from agentrl.tools.shared import Held, Shared
from agentrl.tools.toolkit import Toolkit
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema

if TYPE_CHECKING:
    from mcp_types import Tool as ServerTool

    from agentrl.tools.mcp.connection import McpConnection

_RESTARTED = (
    "(The server was started again after the call before, which it did not survive; it remembers nothing.)"
)


@dataclass(eq=False)
class McpTools(Toolkit):
    """The tools of an MCP server: a program that is started, or an address.

        McpTools(command="mcp-server-time", args=["--local-timezone", "UTC"])
        McpTools(url="http://127.0.0.1:8000/mcp", only=["add"])

    command: a program on the PATH, started with `args`. env: its whole environment; it inherits no variable
        of this process. cwd: its working directory; None = that of this process.
    url: of a server with streamable HTTP, with `headers` on every request; no other origin is reached.
        In values of `env` and `headers`, and in those of `args` that are secrets (after --api-key, for
        example), $NAME is a variable of this process, read when the server starts. Other programs of this
        machine may see `args`; prefer `env`.
    only: names of the tools to offer, as the server lists them; None = all that can be offered.
    prefix: put before every name that the model sees, so that names of two servers cannot collide.
    stateful: the server has state, so every episode has a session of its own, and a process of its own where
        there is a command. Over HTTP that takes a server of a protocol with sessions, 2025-11-25 or older.
        False: all episodes share one session.
    start_timeout_s: seconds for starting the server and listing its tools.
    max_concurrency: calls at a time, over all episodes and tools; None = no limit.

    A call that overruns its deadline counts as the model's mistake, and is cancelled on the server. A server
    that then does not respond for two seconds is restarted, and the model reads that its state is lost.

    Opening raises, and a call raises:
        ToolError: `unavailable`, it does not start; `crashed`, it ended; `protocol`, it is no MCP server.
    """

    command: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    only: Sequence[str] | None = None
    prefix: str = ""
    stateful: bool = True
    start_timeout_s: float = 20.0
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        """Raises UserError where the fields contradict each other, or the SDK is not installed."""
        require("a session with an MCP server", "mcp")
        self._server = _server(self)
        if not self.start_timeout_s > 0:
            raise UserError(f"McpTools: start_timeout_s must be above 0, got {self.start_timeout_s}.")
        self._gate = Gate(self.max_concurrency)
        self._shared = Shared(self._connect, f"MCP server {self.command or self.url}")

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Sequence[Tool]]:
        """The server's tools for one episode.

        Raises:
            ToolError: the server cannot be reached or started, its responses are not MCP, or it lists
                too many tools or too large ones.
            ToolDefinitionError: it lacks a tool of `only`, or describes one by what MCP does not allow, by no
                JSON Schema of an object, or by one whose checks have no bound (see `agentrl.tools.intake`).
                Without `only` such a tool is left out, with a warning, unless there is no other.
        """
        if not self.stateful:
            yield await self._tools(_SharedRoute(self._shared), await self._shared.get())
            return
        route = _OwnRoute(self._connect)
        try:
            yield await self._tools(route, await route.connection())
        finally:
            await route.close()

    def _connect(self) -> AbstractAsyncContextManager[McpConnection]:
        from agentrl.tools.mcp.connection import connect

        return connect(with_variables(self._server), start_timeout_s=self.start_timeout_s)

    async def _tools(self, route: _Route, connection: McpConnection) -> tuple[Tool, ...]:
        by_name = {tool.name: tool for tool in connection.tools}
        refused = dict(connection.refused)
        for name in self.only or ():
            if name in refused:
                raise ToolDefinitionError(_refused(name, refused[name], "leave it out of `only`"))
            if name not in by_name:
                names = ", ".join(by_name) or "none"
                raise ToolDefinitionError(
                    f"the MCP server has no tool `{name}`.{did_you_mean(name, by_name)} It has {names}."
                )

        def read() -> tuple[Tool, ...]:
            if self.only is not None:
                return tuple(self._tool(route, by_name[name]) for name in self.only)
            tools: list[Tool] = []
            for name, offered in by_name.items():
                try:
                    tools.append(self._tool(route, offered))
                except ToolDefinitionError as error:
                    refused[name] = str(error).rstrip(".")
            return tuple(tools)

        # Checking large schemas takes a second: in a thread, so that the event loop goes on.
        tools = await asyncio.to_thread(read)
        if self.only is None:
            _warn_of(refused, has_others=bool(tools))
        return tools

    def _tool(self, route: _Route, offered: ServerTool) -> Tool:
        async def call(**arguments: JSON) -> str:
            return await route.call(offered.name, arguments)

        description = offered.description or offered.title or offered.name
        schema = ToolSchema(f"{self.prefix}{offered.name}", description, offered.input_schema)
        return Tool.described(schema, call, gate=self._gate)


def _refused(name: str, reason: str, remedy: str) -> str:
    return f"the MCP server's tool `{name}` cannot be offered ({reason}); mend the server, or {remedy}."


def _warn_of(refused: Mapping[str, str], *, has_others: bool) -> None:
    """Warn of tools that are left out; once each, since every episode may open a session of its own.

    Raises:
        ToolDefinitionError: there are no others.
    """
    for name, reason in refused.items():
        if not has_others:
            raise ToolDefinitionError(_refused(name, reason, "choose another one"))
        sentence = _refused(name, reason, "name the tools to offer in `only`")
        warnings.warn(f"{sentence[:-1]}; without it the others are offered.", RuntimeWarning, stacklevel=2)


def _server(tools: McpTools) -> Server:
    if (tools.command is None) == (tools.url is None):
        raise UserError("an MCP server has either a `command`, a program to start, or a `url`, an address.")
    if tools.command is not None:
        if tools.headers:
            raise UserError(
                "`headers` belong to the `url` of an MCP server; leave them out with a `command`."
            )
        return command(tools.command, tools.args, tools.env, tools.cwd)
    if tools.args or tools.env or tools.cwd is not None:
        raise UserError("`args`, `env` and `cwd` belong to the `command` of an MCP server; not to a `url`.")
    return address(tools.url or "", tools.headers, with_session=tools.stateful)


class _Route(ABC):
    """How the tools of one episode reach their server."""

    @abstractmethod
    async def call(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """Call a tool. Raises ToolRejected or ToolError."""


class _SharedRoute(_Route):
    """Over the session of all episodes. A broken session is replaced: it has no state to lose."""

    def __init__(self, shared: Shared[McpConnection]) -> None:
        self._shared = shared

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """Call a tool on the shared session."""
        with clocks_stopped():
            connection = await self._shared.get()
            if connection.over or await connection.stuck():
                await self._shared.drop(connection)
                connection = await self._shared.get()
        try:
            return await connection.call(name, arguments)
        except ToolError:
            await self._shared.drop(connection)
            raise


class _OwnRoute(_Route):
    """Over a session of its own, opened again where the server hangs after a cancelled call."""

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[McpConnection]]) -> None:
        self._connect = connect
        self._held = Held(connect(), "MCP server")
        self._restart_lock = asyncio.Lock()
        self._is_stuck = False
        self._restarted = False

    async def connection(self) -> McpConnection:
        """The session, as soon as it is open."""
        return await self._held.value()

    async def close(self) -> None:
        """Close the session."""
        await self._held.close()

    async def call(self, name: str, arguments: Mapping[str, JSON]) -> str:
        """Call a tool; after a restart, the text begins with a note that the state of the server is lost."""
        with clocks_stopped():  # a server that is restarted is no part of a call; `start_timeout_s` bounds it
            async with self._restart_lock:
                await self._restart_if_stuck()
            connection = await self._held.value()
        text = await connection.call(name, arguments)
        restarted, self._restarted = self._restarted, False
        return f"{_RESTARTED}\n{text}" if restarted else text

    async def _restart_if_stuck(self) -> None:
        # A cancellation may end each step; the next call continues from there.
        self._is_stuck = self._is_stuck or await (await self._held.value()).stuck()
        if self._is_stuck:
            await self._held.close()
            self._held = Held(self._connect(), "MCP server")
            self._is_stuck, self._restarted = False, True
