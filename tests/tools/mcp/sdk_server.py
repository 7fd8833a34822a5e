"""An MCP server made with the SDK's own framework, over stdio or, given a port, over streamable HTTP.

python sdk_server.py [PORT [stateless]]
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from pydantic import Field

server = MCPServer("counter")
COUNTS: dict[str, int] = {}


def _session(context: Context) -> str:
    headers = context.headers or {}
    return headers.get("mcp-session-id", "the only one")


@server.tool()
def count(context: Context, by: Annotated[int, Field(ge=1, description="how far")] = 1) -> str:
    """Continue the count of this session."""
    session = _session(context)
    COUNTS[session] = COUNTS.get(session, 0) + by
    return str(COUNTS[session])


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


@server.tool()
async def wait(mark: str, seconds: float) -> str:
    """Write the pid to a file, then wait."""
    Path(mark).write_text(str(os.getpid()))
    await asyncio.sleep(seconds)
    return "waited"


@server.tool(structured_output=False)
def flood(characters: int) -> str:
    """Return a long text."""
    return "x" * characters


@server.tool()
def sessions() -> str:
    """How many sessions have counted."""
    return str(len(COUNTS))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run()
    else:
        server.run("streamable-http", port=int(sys.argv[1]), stateless_http="stateless" in sys.argv)
