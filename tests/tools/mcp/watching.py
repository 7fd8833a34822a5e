"""Servers for the tests of MCP, and their processes as /proc lists them."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agentrl import Limits, Task, ToolEnv
from agentrl.tools import Tool
from agentrl.tools.mcp import McpTools
from tests.processes.pythons_own import is_pythons_own
from tests.worlds import ASK

FOLDER = Path(__file__).parent
RAW, SDK = str(FOLDER / "raw_server.py"), str(FOLDER / "sdk_server.py")
_TIMEOUT_S = 10.0


def raw(*faults: str, **settings) -> McpTools:
    """A toolkit over the raw server, with its faults."""
    return McpTools(command=sys.executable, args=[RAW, *faults], **settings)


class Desk(ToolEnv):
    """A world whose tools are those of toolkits."""

    limits = Limits(max_turns=6, max_tokens=None, tool_timeout_s=10.0)

    def __init__(self, *toolkits: McpTools) -> None:
        self.tools = toolkits
        super().__init__()

    def tasks(self, split):
        return [ASK]

    def reward(self, task: Task, answer: str) -> float:
        return float(answer == task.answer)


@asynccontextmanager
async def opened(toolkit: McpTools):
    """The tools of one episode by their names."""
    async with toolkit.episode() as tools:
        yield {tool.name: tool for tool in tools}


async def in_flight(tool: Tool, mark: Path, **arguments) -> tuple[asyncio.Task[str], int]:
    """Begin a call that writes its pid to a file; the call, and the pid of its server."""
    calling = asyncio.create_task(tool.invoke({"mark": str(mark), **arguments}))
    await until(lambda: mark.exists() and mark.read_text())
    assert not calling.done()
    return calling, int(mark.read_text())


async def ended(calling: asyncio.Task[str]) -> str:
    """The result of a call in flight, with a timeout."""
    return await asyncio.wait_for(calling, _TIMEOUT_S)


async def until(condition) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def servers() -> set[int]:
    """Every process of a test server and of its guard, that this machine runs for this test process."""
    return {pid for pid in _below(Path("/proc/self")) if alive(pid) and not is_pythons_own(pid)}


def _below(process: Path) -> set[int]:
    pids: set[int] = set()
    for path in process.glob("task/*/children"):
        # The thread may have ended since.
        with suppress(OSError):
            for pid in map(int, path.read_text().split()):
                pids |= {pid, *_below(Path(f"/proc/{pid}"))}
    return pids
