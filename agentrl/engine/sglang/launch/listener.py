"""The common base of servers and routers: a port, a log, and a process that can be restarted."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.engine.sglang.control import Server
from agentrl.errors import EngineUnavailableError
from agentrl.processes import guard

HOST = "127.0.0.1"
PORT_OFFSET = 10_000
"""SGLang also uses the port with this offset to its own."""
# Below the ports of outgoing connections, also with PORT_OFFSET added: so the port of a restarted server is
# still free.
_FIRST, _LAST = 12_000, 22_000
_TRIES = 1000


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Different ports of `host` that are free now, each together with its port at PORT_OFFSET.

    Raises:
        EngineUnavailableError: there are too few.
    """
    ports: list[int] = []
    # The sockets stay bound until the last port is chosen, so that the ports differ.
    with ExitStack() as sockets:
        for port in random.sample(range(_FIRST, _LAST), _TRIES):
            if len(ports) == count:
                return ports
            try:
                with ExitStack() as pair:
                    pair.enter_context(_bound(host, port))
                    pair.enter_context(_bound(host, port + PORT_OFFSET))
                    sockets.push(pair.pop_all())
            except OSError:
                continue
            ports.append(port)
    raise EngineUnavailableError(f"{count} ports of {host} between {_FIRST} and {_LAST} are not free.")


def url_of(host: str, port: int) -> str:
    """The address of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_free(port: int, host: str = HOST) -> bool:
    """Whether a server could bind this port of `host` now."""
    try:
        with _bound(host, port):
            return True
    except OSError:
        return False


def _bound(host: str, port: int) -> socket.socket:
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # As servers do: connections in TIME_WAIT do not block the port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
    except OSError:
        holder.close()
        raise
    return holder


_POLL_S = 0.02
_HEALTH_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 5.0
_LAST_BYTES = 16_384
_LAST_LINES = 12
_LINE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """A program. command: an absolute path and arguments. environment: all variables. log: is appended to.

    grace_s: the time between SIGTERM and SIGKILL.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    grace_s: float


class GuardedProcess:
    """A program that can be started and restarted; at most one process of it runs.

    It ends with this process, also where that is killed, and so do all its children. It also ends with the
    thread that called `start`: the thread of the event loop.
    """

    def __init__(self, program: ServerProgram) -> None:
        self.program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._swept = False
        self._log_from = 0

    @property
    def running(self) -> bool:
        """Whether the program, or one of its children, runs."""
        return self._process is not None and not self._has_ended(self._process)

    @property
    def returncode(self) -> int | None:
        """The exit code: 128 + N after signal N, 0 after `stop`; None while it runs, and before the start."""
        return None if self._process is None or not self._has_ended(self._process) else self._process.poll()

    async def start(self, url: str, within_s: float) -> None:
        """Start it and wait until the server at `url` is healthy. On interruption it is stopped.

        Raises:
            EngineUnavailableError: it cannot be started, ended, or took longer than within_s.
        """
        up = False
        try:
            self._spawn()
            await self._wait_healthy(url, within_s)
            up = True
        finally:
            if not up:
                await self.stop()

    def _spawn(self) -> None:
        assert not self.running, "one at a time"
        try:
            self.program.log.parent.mkdir(parents=True, exist_ok=True)
            with self.program.log.open("ab") as log:
                self._log_from = log.tell()
                self._process = subprocess.Popen(
                    guard.command(self.program.command, self.program.grace_s),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=dict(self.program.environment),
                    # Its own process group: Ctrl-C reaches only this process, which then stops it.
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineUnavailableError(f"{self.program.name} cannot be started: {error}.") from error
        self._swept = False

    def terminate(self) -> None:
        """Send SIGTERM to the guard, which ends the program; this does not wait for it."""
        if self._process is not None and not self._has_ended(self._process):
            self._process.terminate()

    async def stop(self) -> None:
        """End the program and its children, and wait. On interruption the guard ends them all the same."""
        self.terminate()
        within_s = self.program.grace_s + guard.GIVE_UP_S + 1.0
        if self._process is not None and not await self.ends_within(within_s):
            self._process.kill()
            await self.ends_within(1.0)

    async def ends_within(self, seconds: float) -> bool:
        """Wait until no process of it runs; returns whether that was so within `seconds`."""
        deadline_s = time.monotonic() + seconds
        while self.running:
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    async def _wait_healthy(self, url: str, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        server = Server(url)
        try:
            while not await server.healthy(_HEALTH_TIMEOUT_S):
                if not self.running:
                    raise EngineUnavailableError(
                        f"{self.program.name} ended with exit code {self.returncode} before it was up; "
                        f"{self.log_tail()}"
                    )
                if time.monotonic() > deadline_s:
                    raise EngineUnavailableError(
                        f"{self.program.name} was not up after {within_s:g} s: see what it waits for, or "
                        f"give servers longer (rollout_health_check_first_wait); {self.log_tail()}"
                    )
                await asyncio.sleep(_HEALTH_POLL_S)
        finally:
            await server.close()

    def log_tail(self) -> str:
        """The last lines of its log since its last start, with a heading."""
        return tail_of(self.program.log, self._log_from)

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        if process.poll() is None:
            return False
        if not self._swept:
            self._swept = True
            # Where the guard was killed, its server has ended with it, but not the server's children.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return True


def tail_of(path: Path, start: int = 0) -> str:
    """The last lines of a log, from a byte on, with a heading."""
    with suppress(OSError), path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(start, size - _LAST_BYTES))
        text = log.read().decode("utf-8", "replace")
        lines = [_printable(line) for line in text.splitlines() if line.strip()][-_LAST_LINES:]
        return "\n  ".join([f"the last lines of {path}:", *(lines or ["(none)"])])
    return f"{path} cannot be read."


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line.rstrip())[:_LINE_CHARACTERS]


class Listener(ABC):
    """A program that listens on a port of this machine, the same one after each restart.

    name: of its log file, log. host: the address that it listens at. Used by one event loop: the
    program ends with the thread of that loop. left_s: this machine does not go away before this process.
    """

    left_s: float | None = None

    def __init__(self, name: str, port: int, log_folder: Path, host: str = HOST) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.log = log_folder / f"{name}.log"
        self._process: GuardedProcess | None = None

    @property
    def url(self) -> str:
        """Its address, whether it runs or not."""
        return url_of(self.host, self.port)

    @property
    def running(self) -> bool:
        """Whether its process, or one of its children, runs; also one that hangs."""
        return self._process is not None and self._process.running

    @property
    def returncode(self) -> int | None:
        """The exit code of the last run: 128 + N after signal N, 0 after `stop`.

        None: it runs, or was never started.
        """
        return None if self._process is None else self._process.returncode

    @property
    def end_reason(self) -> str:
        """How it ended, for an error message."""
        return f"it ended (exit code {self.returncode})"

    @abstractmethod
    async def start(self) -> None:
        """Start or restart it, and wait until it answers. On interruption it is stopped.

        Raises:
            EngineUnavailableError: it ended, or did not answer in time; with the last lines of its log.
        """

    def terminate(self) -> None:
        """Send SIGTERM, without waiting for the end."""
        if self._process is not None:
            self._process.terminate()

    async def stop(self) -> None:
        """Stop it and all its children, and wait for their end. Does nothing where it does not run."""
        await self._end()

    async def _end(self) -> None:
        if self._process is not None:
            await self._process.stop()

    def log_tail(self) -> str:
        """The last lines of its log, with a heading."""
        return f"{self.name} was never started." if self._process is None else self._process.log_tail()

    async def _start_process(
        self, command: Sequence[str], environment: Mapping[str, str], *, grace_s: float, within_s: float
    ) -> None:
        await self._end()
        if not is_free(self.port, self.host):
            raise EngineUnavailableError(
                f"{self.name} cannot listen at {self.url}: another process does; end that one."
            )
        self._process = GuardedProcess(ServerProgram(self.name, command, environment, self.log, grace_s))
        await self._process.start(self.url, within_s)
