"""What servers and routers have in common: a port, a log, and a process that may be started again."""

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

from agentrl import guard
from agentrl.engine.sglang.control import Server
from agentrl.errors import EngineUnavailableError

HOST = "127.0.0.1"
ABOVE = 10_000
"""SGLang keeps the port this much above its own for itself."""
# Below those that the kernel gives to outgoing connections, also with ABOVE added: a server that is started
# again finds its port free.
_FIRST, _LAST = 12_000, 22_000
_TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Different ports that are free now, each with the one ABOVE it.

    Raises:
        EngineUnavailableError: there are none.
    """
    found: list[int] = []
    # Held until all are found, so that they differ.
    with ExitStack() as held:
        for port in random.sample(range(_FIRST, _LAST), _TRIES):
            if len(found) == count:
                return found
            try:
                with ExitStack() as both:
                    both.enter_context(_bound(port))
                    both.enter_context(_bound(port + ABOVE))
                    held.push(both.pop_all())
            except OSError:
                continue
            found.append(port)
    raise EngineUnavailableError(f"{count} ports of {HOST} between {_FIRST} and {_LAST} are not free.")


def is_free(port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        with _bound(port):
            return True
    except OSError:
        return False


def _bound(port: int) -> socket.socket:
    holder = socket.socket()
    try:
        # As servers do: connections that have just ended don't keep a port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((HOST, port))
    except OSError:
        holder.close()
        raise
    return holder


_LOOK_AGAIN_S = 0.02
_ASK_AGAIN_S = 0.1
_ANSWER_S = 5.0
_LAST_BYTES = 16_384
_LAST_LINES = 12
_LINE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Program:
    """What runs. command: an absolute path and arguments. environment: all of it. log: is appended to.

    grace_s: how long its processes have to end by themselves before they are killed.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    grace_s: float


class GuardedProcess:
    """A program that may be started, end and be started again; at most one of it runs.

    It ends with us, whatever happens to us, and so does all that it started. It also ends with the thread
    that called `start`: the one that runs the event loop.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._swept = False
        self._log_from = 0

    @property
    def running(self) -> bool:
        """Whether the program, or anything that it started, runs."""
        return self._process is not None and not self._over(self._process)

    @property
    def returncode(self) -> int | None:
        """Its exit code; 128 + N where signal N ended it, 0 where we did; None while it runs or before."""
        return None if self._process is None or not self._over(self._process) else self._process.poll()

    async def brought_up(self, url: str, within_s: float) -> None:
        """Start it and wait until the server at `url` is healthy. Interrupted, it leaves nothing.

        Raises:
            EngineUnavailableError: it cannot be started, ended, or took longer.
        """
        up = False
        try:
            self._start()
            await self._healthy(url, within_s)
            up = True
        finally:
            if not up:
                await self.stop()

    def _start(self) -> None:
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
                    # Its own group: Ctrl-C reaches us alone, and we end it.
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineUnavailableError(f"{self.program.name} cannot be started: {error}.") from error
        self._swept = False

    def ask_to_end(self) -> None:
        """Tell the guard to end everything. It does so by itself: this waits for nothing."""
        if self._process is not None and not self._over(self._process):
            self._process.terminate()

    async def stop(self) -> None:
        """End everything and wait until it is gone. Interrupted, it happens all the same, unwatched."""
        self.ask_to_end()
        within_s = self.program.grace_s + guard.GIVE_UP_S + 1.0
        if self._process is not None and not await self.ends_within(within_s):
            self._process.kill()
            await self.ends_within(1.0)

    async def ends_within(self, seconds: float) -> bool:
        """Wait until nothing of it runs, for so long at most; whether that is so."""
        until = time.monotonic() + seconds
        while self.running:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_LOOK_AGAIN_S)
        return True

    async def _healthy(self, url: str, within_s: float) -> None:
        until = time.monotonic() + within_s
        server = Server(url)
        try:
            while not await server.healthy(_ANSWER_S):
                if not self.running:
                    raise EngineUnavailableError(
                        f"{self.program.name} ended with exit code {self.returncode} before it was up; "
                        f"{self.last_words()}"
                    )
                if time.monotonic() > until:
                    raise EngineUnavailableError(
                        f"{self.program.name} was not up after {within_s:g} s: give it longer, or see what "
                        f"it waits for; {self.last_words()}"
                    )
                await asyncio.sleep(_ASK_AGAIN_S)
        finally:
            await server.close()

    def last_words(self) -> str:
        """The last lines that it wrote since it was last started, in words for a person."""
        with suppress(OSError), self.program.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_from, size - _LAST_BYTES))
            text = log.read().decode("utf-8", "replace")
            lines = [_shown(line) for line in text.splitlines() if line.strip()][-_LAST_LINES:]
            return "\n  ".join([f"the last lines of {self.program.log}:", *(lines or ["(none)"])])
        return f"{self.program.log} cannot be read."

    def _over(self, process: subprocess.Popen[bytes]) -> bool:
        if process.poll() is None:
            return False
        if not self._swept:
            self._swept = True
            # Somebody may have killed the guard: its server has gone with it, children of that have not.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        return True


def _shown(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line.rstrip())[:_LINE_CHARACTERS]


class Listener(ABC):
    """A program that listens at a port of this machine. It may end and be started again at the same one.

    name: names its log file, log. Used by one event loop: it ends with the thread of that loop.
    """

    def __init__(self, name: str, port: int, log_folder: Path) -> None:
        self.name = name
        self.port = port
        self.log = log_folder / f"{name}.log"
        self._process: GuardedProcess | None = None

    @property
    def url(self) -> str:
        """Its address, whether it runs or not."""
        return f"http://{HOST}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether its process, or anything that it started, runs. One that hangs runs, too."""
        return self._process is not None and self._process.running

    @property
    def returncode(self) -> int | None:
        """The exit code of the last run: 128 + N where signal N ended it, 0 where `stop` did.

        None: it runs, or was never started.
        """
        return None if self._process is None else self._process.returncode

    @abstractmethod
    async def start(self) -> None:
        """Start it, again where it runs, and wait until it answers. Interrupted, it leaves nothing.

        Raises:
            EngineUnavailableError: it ended, or did not answer in time; with the last lines of its log.
        """

    def ask_to_end(self) -> None:
        """Have it ended, without waiting for that."""
        if self._process is not None:
            self._process.ask_to_end()

    async def stop(self) -> None:
        """End it and all that it started, and wait until they are gone. Fine where nothing runs."""
        if self._process is not None:
            await self._process.stop()

    def last_words(self) -> str:
        """The last lines of its log, in words for a person."""
        return f"{self.name} was never started." if self._process is None else self._process.last_words()

    async def _bring_up(
        self, command: Sequence[str], environment: Mapping[str, str], *, grace_s: float, within_s: float
    ) -> None:
        await self.stop()
        if not is_free(self.port):
            raise EngineUnavailableError(
                f"{self.name} cannot listen at {self.url}: another process does; end that one."
            )
        self._process = GuardedProcess(Program(self.name, command, environment, self.log, grace_s))
        await self._process.brought_up(self.url, within_s)
