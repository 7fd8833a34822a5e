"""Environments that are served in this process, and a client that speaks frames."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

from websockets.asyncio.client import connect

from agentrl import Limits, Task, ToolEnv, tool
from agentrl.envs.openenv.server import application_of, paced_socket
from agentrl.envs.openenv.sessions import ServedSessions, ServedWorld
from agentrl.http.serving import RequestChecks
from agentrl.tools import inline
from tests.listening import listening


class Adding(ToolEnv):
    """Add two numbers; made, open and closed instances are counted."""

    id = "Adding-v0"
    splits = ("train", "test")
    limits = Limits(max_turns=4, step_timeout_s=0.5, reset_timeout_s=0.5)
    made, open_, hanging = 0, set(), asyncio.Event()

    def __init__(self):
        self.tools = (self.add, self.hang, self.fail)
        super().__init__()
        Adding.made += 1

    def tasks(self, split):
        return [
            Task(f"{split}-{n}", Task.ask("", f"What is {n} + 1?").prompt, str(n + 1), {}, split)
            for n in range(5 if split == "train" else 3)
        ]

    @tool(inline=True)
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    @tool
    async def hang(self) -> str:
        """Take for ever."""
        Adding.hanging.set()
        await asyncio.sleep(3600)
        return ""

    @tool
    def fail(self) -> str:
        """Break."""
        raise OSError("the disk is gone")

    async def reset(self, task, *, seed):
        Adding.open_.add(self)
        return await super().reset(task, seed=seed)

    async def close(self):
        Adding.open_.discard(self)
        await super().close()

    @inline
    def reward(self, task, answer):
        return float(answer.strip() == task.answer)


async def until(is_so):
    """Wait for what a server does a moment later."""
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(make=Adding, *, most=64, idle_s=600.0, key=None):
    """The sessions and the address of a served environment."""
    sessions = ServedSessions(ServedWorld(make), most, idle_s)
    app = application_of(sessions, RequestChecks(control_key=key))
    async with listening(app, websocket=paced_socket()) as url:
        yield sessions, url


class Frames:
    """A WebSocket of a served environment."""

    def __init__(self, socket):
        self.socket = socket

    async def ask(self, kind, **data):
        message = {"type": kind} if kind in ("state", "close") else {"type": kind, "data": data}
        return await self.raw(json.dumps(message))

    async def raw(self, text):
        await self.socket.send(text)
        return await self.read()

    async def read(self):
        return json.loads(await asyncio.wait_for(self.socket.recv(), 10))

    async def rpc(self, method, **params):
        reply = await self.raw(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}))
        return reply.get("result") or reply["error"]


@asynccontextmanager
async def session(url, path="/ws", **headers):
    """A session, as a client without a library of OpenEnv has it."""
    address = f"{url.replace('http', 'ws')}{path}"
    async with connect(address, additional_headers=headers, proxy=None) as socket:
        yield Frames(socket)
