"""Work in processes that the kernel ends at a limit of CPU time, and that are replaced in milliseconds.

    host --a socket for each slot--> supervisor --fork--> worker

    python -P forking.py WORK MEMORY_MB HOST FD [FD ...]

WORK is the path of a Python file with `prepare(setup: bytes)`. It imports what the work needs, once, and
returns a function from a request (bytes) to its reply (bytes). The setup is the standard input. Each
descriptor is one end of a socket, and is served by a supervisor: it forks a worker for the requests and,
whenever one dies, reports its signal and forks the next. All processes end when the process HOST dies, or
when their sockets are closed; a worker that is busy then ends at its limit.

The limit is the kernel's, since a computation in C runs no handler of a signal.

It imports nothing of agentrl, so that a program of few imports starts without that delay.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import struct
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple, NoReturn

Reply = Callable[[bytes], bytes]

_REQUEST = struct.Struct("<dQ")  # the limit of CPU time (s), the number of bytes that follow
_REPLY = struct.Struct("<iQ")  # the signal that ended the worker, or _ALIVE; the number of bytes that follow
_ALIVE = -1
_WALL_FACTOR = 10
_WALL_GRACE_S = 60.0
_HOST_GRACE_S = 120.0  # the worker's own limits come first; the first reply waits for the imports
_MAX_REQUESTS = 2000
_USED_UP = 3
_WATCH_S = 1.0
_CHUNK = 2**18


class Death(NamedTuple):
    """A worker ended instead of replying. signum: the signal that ended it; 0 = it ended by an exception."""

    signum: int

    @property
    def is_late(self) -> bool:
        """Whether the kernel ended it at the limit of its CPU time."""
        return self.signum == signal.SIGPROF

    @property
    def is_from_outside(self) -> bool:
        """Whether the request is not its cause: it was killed, or got too little time on a busy machine."""
        return self.signum in (signal.SIGKILL, signal.SIGALRM)


class Workers:
    """Processes that reply to one request at a time each. Start them with `started`."""

    def __init__(self, slots: Iterable[socket.socket]) -> None:
        self._free: asyncio.Queue[socket.socket] = asyncio.Queue()
        for slot in slots:
            self._free.put_nowait(slot)
        self._exchanges: set[asyncio.Task[bytes | Death]] = set()

    async def reply(self, request: bytes, cpu_s: float) -> bytes | Death:
        """The reply to a request.

        cpu_s: CPU seconds of the work, so that the load of the machine does not decide. A process that does
        not get them in ten times as many seconds, and a minute, is killed as well: a death from outside.

        Waits for: a free process, in the order of the calls, then its reply. Unblocked by: the limits. On
        cancellation: the work goes on to its end, and the next caller waits for that.

        Raises:
            OSError, EOFError: the processes died.
        """
        slot = await self._free.get()
        exchange = asyncio.create_task(self._exchanged(slot, request, cpu_s))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._ended)
        return await asyncio.shield(exchange)

    def _ended(self, exchange: asyncio.Task[bytes | Death]) -> None:
        self._exchanges.discard(exchange)
        # reply() raises its exception; without a caller, asyncio would log it as never retrieved.
        if not exchange.cancelled():
            exchange.exception()

    async def _exchanged(self, slot: socket.socket, request: bytes, cpu_s: float) -> bytes | Death:
        try:
            async with asyncio.timeout(2 * _WALL_FACTOR * cpu_s + _HOST_GRACE_S):
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(slot, _REQUEST.pack(cpu_s, len(request)) + request)
                signum, length = _REPLY.unpack(await _exactly(slot, _REPLY.size))
                reply = await _exactly(slot, length)
        finally:
            self._free.put_nowait(slot)
        return reply if signum == _ALIVE else Death(signum)


@asynccontextmanager
async def started(work: Path, processes: int, *, memory_mb: int, setup: bytes) -> AsyncIterator[Workers]:
    """Start workers; leaving the context ends every process of them.

    work: a file as at the top of this module. memory_mb: what one request may take on top of the imports.
    """
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(processes)]
        for ours, theirs in pairs:
            stack.callback(ours.close)
            stack.callback(theirs.close)
            ours.setblocking(False)
        setup_file = stack.enter_context(TemporaryFile())
        setup_file.write(setup)
        setup_file.seek(0)
        descriptors = [theirs.fileno() for _, theirs in pairs]
        numbers = [str(number) for number in (memory_mb, os.getpid(), *descriptors)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", __file__, str(work), *numbers,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_ENVIRONMENT},
            stdin=setup_file, stdout=DEVNULL, stderr=DEVNULL, pass_fds=descriptors, start_new_session=True,
        )  # fmt: skip
        for _, theirs in pairs:
            theirs.close()
        try:
            yield Workers(ours for ours, _ in pairs)
        finally:
            _end(process, [ours for ours, _ in pairs])
            await process.wait()


# Threads of libraries do not survive a fork.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _end(process: Process, slots: Sequence[socket.socket]) -> None:
    for slot in slots:
        # Not only close(): children that the host forked hold this socket, too.
        with suppress(OSError):
            slot.shutdown(socket.SHUT_RDWR)
    if process.returncode is None:  # else its group may be another one's by now
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _exactly(slot: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = await asyncio.get_running_loop().sock_recv(slot, min(length - len(received), _CHUNK))
        if not part:
            raise EOFError("a socket is closed")
        received += part
    return bytes(received)


def main(work: Path, memory_mb: int, host: int, descriptors: Sequence[int]) -> None:
    """Serve the sockets until all of them are closed, or the host dies."""
    logging.disable(logging.CRITICAL)
    reply = _prepared(work, sys.stdin.buffer.read())
    # Pages of objects that are never collected stay shared with the workers.
    gc.freeze()
    for fd in descriptors:
        if os.fork() == 0:
            _close(other for other in descriptors if other != fd)
            _supervise(fd, memory_mb, reply)
    _close(descriptors)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    with suppress(ChildProcessError):
        while True:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            # Children that the host forked hold its sockets: their end is not the host's.
            if os.getppid() != host:
                os.killpg(0, signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, _WATCH_S)


def _prepared(work: Path, setup: bytes) -> Reply:
    spec = spec_from_file_location(work.stem, work)
    if spec is None or spec.loader is None:
        raise ImportError(f"{work} is no Python file")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    prepare: Callable[[bytes], Reply] = module.prepare
    return prepare(setup)


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def _supervise(fd: int, memory_mb: int, reply: Reply) -> NoReturn:
    """Keep a worker alive until the socket is closed."""
    while True:
        worker = os.fork()
        if worker == 0:
            _bound_memory(memory_mb)
            _work(fd, reply)
        _, status = os.waitpid(worker, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _USED_UP:
            continue
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            os._exit(0)
        try:
            _send(fd, _REPLY.pack(os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, 0))
        except OSError:  # the host has closed it
            os._exit(0)


def _work(fd: int, reply: Reply) -> NoReturn:
    """Reply to requests; the kernel ends the process at a limit, whatever it computes."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    with open(fd, "rb", closefd=False) as requests:
        for _ in range(_MAX_REQUESTS):
            header = requests.read(_REQUEST.size)
            if len(header) < _REQUEST.size:
                os._exit(0)
            cpu_s, length = _REQUEST.unpack(header)
            request = requests.read(length)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            signal.setitimer(signal.ITIMER_REAL, cpu_s * _WALL_FACTOR + _WALL_GRACE_S)
            result = reply(request)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            _send(fd, _REPLY.pack(_ALIVE, len(result)) + result)
    os._exit(_USED_UP)  # caches only grow


def _bound_memory(memory_mb: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere the kernel enforces no such limit
        mapped_bytes = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = mapped_bytes + memory_mb * 2**20
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _send(fd: int, data: bytes) -> None:
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[os.write(fd, unsent) :]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [int(fd) for fd in sys.argv[4:]])
