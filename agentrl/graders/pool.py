"""A pool of processes that compare mathematical answers, each of which the kernel ends at its limits.

    host --a socket for each slot--> supervisor --fork--> worker: math-verify

Where a comparison exceeds its CPU time, the worker dies and the supervisor forks another (`inside/compare`).
Where the host ends or dies, the sockets close and all of the processes end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Literal

from agentrl.errors import GradingError
from agentrl.types import JSON

Outcome = Literal["equal", "different", "timeout", "crashed"]
"""`timeout`: the comparison was killed at its limit. `crashed`: the answer made the process crash."""

_PROGRAM = str(Path(__file__).parent / "inside" / "compare.py")
_MEMORY_MB = 1024
_GRACE_S = 120.0  # the workers' own limits come first; the first reply waits for the import of sympy
_MAX_REPLY_BYTES = 1000
_FROM_OUTSIDE: Mapping[object, str] = {
    signal.SIGKILL: "was killed from outside, or memory ran out",
    signal.SIGALRM: "got too little CPU time on a busy machine",
}
"""Signals that are no fault of the answer."""


class MathPool:
    """Processes that compare one pair of expressions at a time. Start one with `started`."""

    def __init__(self, slots: list[socket.socket]) -> None:
        self._free: asyncio.Queue[socket.socket] = asyncio.Queue()
        for slot in slots:
            self._free.put_nowait(slot)
        self._exchanges: set[asyncio.Task[Outcome]] = set()

    async def compare(self, answer: str, gold: str, cpu_s: float) -> Outcome:
        """Whether math-verify takes two expressions for equal.

        cpu_s: CPU seconds of the comparison, so that the load of the machine does not decide. A process that
        does not get them in ten times as many seconds, and a minute, is killed as well, and is no outcome.

        Waits for: a free process, in the order of the calls, then its reply. Unblocked by: the limits. On
        cancellation: the comparison goes on to its end, and the next caller waits for that.

        Raises:
            GradingError: the pool died, or the machine is too busy.
        """
        slot = await self._free.get()
        request: dict[str, JSON] = {"answer": answer, "gold": gold, "cpu_s": cpu_s}
        exchange = asyncio.create_task(self._exchanged(slot, request, 20 * cpu_s + _GRACE_S))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._ended)
        return await asyncio.shield(exchange)

    def _ended(self, exchange: asyncio.Task[Outcome]) -> None:
        self._exchanges.discard(exchange)
        # compare() raises its exception; without a caller, asyncio would log it as never retrieved.
        if not exchange.cancelled():
            exchange.exception()

    async def _exchanged(self, slot: socket.socket, request: dict[str, JSON], timeout_s: float) -> Outcome:
        try:
            async with asyncio.timeout(timeout_s):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(slot, json.dumps(request).encode() + b"\n")
                reply = await _line(slot)
        except (OSError, EOFError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise GradingError("crashed", f"the processes of math-verify died: {reason}") from error
        finally:
            self._free.put_nowait(slot)
        if "equal" in reply:
            return "equal" if reply["equal"] else "different"
        if reply["died"] in _FROM_OUTSIDE:
            raise GradingError("crashed", f"a process of math-verify {_FROM_OUTSIDE[reply['died']]}")
        return "timeout" if reply["died"] == signal.SIGPROF else "crashed"


@asynccontextmanager
async def started(processes: int) -> AsyncIterator[MathPool]:
    """Start a pool; leaving the context ends every process of it.

    processes: comparisons at a time.
    """
    with ExitStack() as sockets:
        pairs = [socket.socketpair() for _ in range(processes)]
        for ours, theirs in pairs:
            sockets.callback(ours.close)
            sockets.callback(theirs.close)
            ours.setblocking(False)
        descriptors = [theirs.fileno() for _, theirs in pairs]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", _PROGRAM, str(_MEMORY_MB), *map(str, descriptors),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, pass_fds=descriptors, start_new_session=True,
        )  # fmt: skip
        for _, theirs in pairs:
            theirs.close()
        try:
            yield MathPool([ours for ours, _ in pairs])
        finally:
            _end(process, [ours for ours, _ in pairs])
            await process.wait()


def _end(process: Process, slots: list[socket.socket]) -> None:
    for slot in slots:
        # Not only close(): children that the host forked hold this socket, too.
        with suppress(OSError):
            slot.shutdown(socket.SHUT_RDWR)
    if process.returncode is None:  # else its group may be another one's by now
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _line(slot: socket.socket) -> dict[str, JSON]:
    received = b""
    while not received.endswith(b"\n"):
        part = await asyncio.get_running_loop().sock_recv(slot, _MAX_REPLY_BYTES)
        if not part:
            raise EOFError("a socket is closed")
        received += part
        if len(received) > _MAX_REPLY_BYTES:
            raise ValueError("a reply is too long")
    reply: JSON = json.loads(received)
    if not isinstance(reply, dict) or not {"equal", "died"} & reply.keys():
        raise ValueError("a reply is of another form")
    return reply
