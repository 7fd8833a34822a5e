"""The longest hold of the event loop by what a hostile server sends.

Texts in JSON are counted and parsed as every client does it; results of a server of MCP are read over stdio.
A task of the loop wakes up every 10 ms. What counts is the CPU time of all threads between two of its turns,
so that the load of the machine does not.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress

from agentrl.errors import ToolError, ToolRejected
from agentrl.http.requests import check_values, json_of, off_loop
from agentrl.run.stages import PERIOD_S
from agentrl.runtime.collector import rare_collections
from agentrl.tools.mcp import McpTools
from benchmarks import flooding_server

_START_TIMEOUT_S = 60.0
# About as many values as the bound allows, and as many bytes.
TEXTS = {
    "small lists": b"[" + b"[]," * 95_000 + b"1]",
    "small objects": b"[" + b'{"a":1},' * 60_000 + b"1]",
    "numbers": b"[" + b"0.123456789," * 190_000 + b"1]",
    "keys": b"{" + b",".join(b'"k%d":1' % number for number in range(190_000)) + b"}",
    "15 MB of small lists": b"[" + b"[]," * 5_000_000 + b"1]",
    "15 MB of strings": b"[" + b'"",' * 5_000_000 + b"1]",
    "a string of 16 MB": b'"' + b"\\u00e4" * 2_700_000 + b'"',
    "numbers of 4,000 digits": b"[" + (b"9" * 4_000 + b",") * 4_000 + b"1]",
}


async def holds_of_floods() -> dict[str, float]:
    """Milliseconds, by the kind of reply."""
    server = McpTools(
        command=sys.executable, args=[flooding_server.__file__], start_timeout_s=_START_TIMEOUT_S
    )
    # As in a run: Python's own collector holds the loop for longer than any of these.
    with rare_collections():
        holds = {name: await _hold(_read(text)) for name, text in TEXTS.items()}
        async with server.episode() as tools:
            for tool in tools:
                holds[f"MCP, {tool.name}"] = await _hold(tool.invoke({}))
    return holds


async def _read(text: bytes) -> None:
    await check_values(text)
    await off_loop(json_of, text)


async def _hold(work: Coroutine[None, None, object]) -> float:
    longest_s = 0.0
    task = asyncio.create_task(work)
    # The model's mistakes and the server's: what it sent is refused.
    with suppress(ValueError, ToolError, ToolRejected):
        while not task.done():
            began_s = time.process_time()
            await asyncio.sleep(PERIOD_S)
            longest_s = max(longest_s, time.process_time() - began_s)
        await task
    return 1e3 * longest_s
