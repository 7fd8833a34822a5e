"""Sessions at once of a served environment that waits: how many are served, and how long each takes.

    python -m benchmarks.openenv URL SESSIONS

`agentrl serve-env` serves an environment whose step takes a second, and computes nothing. All clients begin
in the same moment: each connects, resets, takes one step, and goes. They are one process of their own, this
module as a program, which shares the machine with the server: a client is a socket and little else.

    whole      the time of a session, from the first byte of its handshake to the answer of its step
    step       of the step alone, which waits for a second: what is above is the server's, and the client's
    cpu        CPU time of a session, of the server's process and of the client's
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from agentrl.envs import Env
from agentrl.runtime.collector import rare_collections
from agentrl.types import JSON, Message, Observation, Step, Task
from benchmarks.compare import figures_of, quantile
from benchmarks.machine import machine
from benchmarks.sections import as_json

_TIMEOUT_S = 60.0
_KEY = "AAAAAAAAAAAAAAAAAAAAAA=="
_LINE_BYTES = 1 << 24
_MASK = b"\0\0\0\0"
_SHORT, _LONG = 126, 127
_TEXT = 0x81


@dataclass(frozen=True, slots=True)
class OpenEnvLoad:
    """The workload. Frozen. sizes: sessions at once. wait_s: what a step takes (seconds)."""

    sizes: tuple[int, ...] = (256, 2048)
    wait_s: float = 1.0
    repeats: int = 5


class Waiting(Env):
    """Its only step waits for a while, and computes nothing."""

    splits = ("train",)

    def __init__(self, wait_s: float = 1.0) -> None:
        super().__init__()
        self.wait_s = wait_s

    def tasks(self, split: str) -> Sequence[Task]:
        """One task."""
        del split
        return [Task.ask("wait", "Say something.")]

    async def reset(self, task: Task, *, seed: int) -> tuple[Observation, Mapping[str, JSON]]:
        """The question."""
        del seed
        return task.prompt, {}

    async def step(self, action: Message) -> Step:
        """Wait, and end."""
        del action
        await asyncio.sleep(self.wait_s)
        return Step.finished(reward=1.0)


class _Spent(NamedTuple):
    """One session (seconds)."""

    whole_s: float
    step_s: float


def bench_openenv(load: OpenEnvLoad | None = None) -> dict[str, JSON]:
    """Run every size, one after the other.

    Returns:
        summary: by size, the median of the repeats: served (share), quantiles of `whole_s` and `step_s`, and
            CPU time of a session (`server_cpu_ms`, `client_cpu_ms`).
        runs: by size and figure, the median, its spread and every repeat.
        settings: the workload, the machine, and its load before each size (1 minute).
    """
    return asyncio.run(_bench(load or OpenEnvLoad()))


async def _bench(load: OpenEnvLoad) -> dict[str, JSON]:
    runs: dict[str, JSON] = {}
    summary: dict[str, JSON] = {}
    loads: dict[str, JSON] = {}
    for size in load.sizes:
        loads[str(size)] = os.getloadavg()[0]
        async with _server(load.wait_s) as (server, url):
            repeats = [await _played(server, url, size) for _ in range(load.repeats)]
        figures = {name: figures_of([repeat[name] for repeat in repeats]) for name in repeats[0]}
        summary[str(size)] = {name: round(one.median, 4) for name, one in figures.items()}
        runs[str(size)] = {name: one._asdict() for name, one in figures.items()}
    settings: dict[str, JSON] = {"openenv": as_json(asdict(load)), "machine": machine(), "load": loads}
    return {"summary": summary, "runs": runs, "settings": settings}


@asynccontextmanager
async def _server(wait_s: float) -> AsyncIterator[tuple[int, str]]:
    """The process and the address of the served environment, during the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentrl.cli", "serve-env", "benchmarks.openenv:Waiting"),
        *("--env-kwargs", json.dumps({"wait_s": wait_s}), "--port", "0", "--json"),
        stdout=PIPE,
    )
    try:
        yield process.pid, json.loads(await _line(process))["url"]
    finally:
        process.terminate()
        await process.wait()


async def _played(server: int, url: str, size: int) -> dict[str, float]:
    """The figures of one run of so many sessions. server: its process."""
    before_s = _cpu_s(server)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.openenv", url, str(size)),
        stdout=PIPE,
        limit=_LINE_BYTES,
    )
    client_s, *sessions = json.loads(await _line(process))
    await process.wait()
    spent = [_Spent(*each) for each in sessions]
    figures = {
        "served": len(spent) / size,
        "server_cpu_ms": 1e3 * (_cpu_s(server) - before_s) / size,
        "client_cpu_ms": 1e3 * client_s / size,
    }
    for name in _Spent._fields:
        values = [getattr(each, name) for each in spent]
        figures |= {f"{name} p50": quantile(values, 0.5), f"{name} p99": quantile(values, 0.99)}
        figures[f"{name} max"] = max(values)
    return figures


def _cpu_s(process: int) -> float:
    """The CPU time of a process so far (seconds)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _line(process: Process) -> bytes:
    assert process.stdout is not None, "it is a pipe"
    return await process.stdout.readline()


async def _session(url: str) -> _Spent | None:
    """One session; None = it was not served."""
    address = urlsplit(url)
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(
                f"GET /ws HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {_KEY}\r\n\r\n".encode()
            )
            if not (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101"):
                return None
            await _asked(reader, writer, "reset", {"seed": 0})
            reset_s = time.perf_counter()
            reply = await _asked(reader, writer, "step", {"message": "Hello."})
            end_s = time.perf_counter()
            writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return None
    is_served = isinstance(reply, dict) and isinstance(data := reply.get("data"), dict) and data.get("done")
    return _Spent(end_s - began_s, end_s - reset_s) if is_served else None


async def _asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str, data: JSON) -> JSON:
    """The reply to a message, which is one frame."""
    text = json.dumps({"type": kind, "data": data}).encode()
    assert len(text) < _SHORT, "its length is one byte"
    writer.write(bytes([_TEXT, 0x80 | len(text)]) + _MASK + text)
    first = 0
    while first != _TEXT:
        # Of a server that is slower than its pings, others come between.
        first, length = await reader.readexactly(2)
        if length == _SHORT:
            (length,) = struct.unpack(">H", await reader.readexactly(2))
        elif length == _LONG:
            (length,) = struct.unpack(">Q", await reader.readexactly(8))
        content = await reader.readexactly(length)
    reply: JSON = json.loads(content)
    return reply


async def main(url: str, size: int) -> None:
    """Play so many sessions at once; print the CPU time of all, and what each has spent."""
    began_s = time.process_time()
    with rare_collections():
        spent = await asyncio.gather(*(_session(url) for _ in range(size)))
    cpu_s = time.process_time() - began_s
    print(json.dumps([cpu_s, *(each for each in spent if each is not None)]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
