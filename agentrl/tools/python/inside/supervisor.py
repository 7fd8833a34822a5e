"""Pid 1 of a session: starts the interpreter, holds it to its limits, and ends everything in it.

Every process of the session is a descendant. When pid 1 of a pid namespace ends, the kernel kills the rest;
signals from inside cannot reach it. Between calls of a stateful session all others are stopped.

Consumes: cells of code from the host's socket. Waits for: the socket, the interpreter, its output, the next
look at the limits. Ends: when the host closes the socket, or a limit is broken.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from typing import TypedDict

from . import wire
from .limits import Limits
from .usage import Processes

_LOOK_S = 0.05
_SOON_S = 0.002
_CHUNK_BYTES = 65_536
_MOST_CHUNKS = 32  # a flood must not keep the supervisor from its other duties; a pipe holds less
_REPORTS = {b"d": "done", b"e": "error"}


class Result(TypedDict):
    """How a cell ended.

    outcome: done, error, timeout, cpu, memory, processes, signal or ended. detail: the signal, or the exit
        code. over: the session has ended with it.
    """

    outcome: str
    detail: str
    output: str
    dropped_bytes: int
    cpu_s: float
    over: bool


class Everybody:
    """All processes of a session but this one, as pid 1 of their namespace sees them."""

    def signal(self, number: int) -> None:
        """Send a signal to every one of them at once; no fork can slip through."""
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            return

    def reap(self) -> None:
        """Wait for all of them, after they were killed."""
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


class Supervisor:
    """Runs the cells of one session.

    start: forks the interpreter; given the ends of its pipes, returns its process id.
    """

    def __init__(
        self,
        host: int,
        limits: Limits,
        processes: Processes,
        everybody: Everybody,
        start: Callable[[int, int, int], int],
    ) -> None:
        self._host, self._limits, self._processes, self._everybody = host, limits, processes, everybody
        cells, self._cells = os.pipe()
        self._status, status = os.pipe()
        self._output, output = os.pipe()
        self._interpreter = start(cells, status, output)
        for fd in (cells, status, output):
            os.close(fd)
        for fd in (self._cells, self._status, self._output):
            # The other ends are in untrusted hands: nothing here may wait for them.
            os.set_blocking(fd, False)
        self._kept = bytearray()
        self._dropped = 0

    def serve(self) -> None:
        """Run cells until the host goes away or the session is over."""
        over = False
        while not over and (cell := wire.read(self._host)) is not None:
            result = self._run(cell)
            if result is None:
                return
            over = result["over"]
            wire.write(self._host, result)

    def _run(self, cell: object) -> Result | None:
        """Run one cell; None where the host went away meanwhile."""
        self._kept.clear()
        self._dropped = 0
        began, used = time.monotonic(), self._cpu_s()
        self._everybody.signal(signal.SIGCONT)
        outcome = self._watched(began, used) if self._handed_over(cell) else "ended"
        if outcome is None:
            return None
        over = not (self._limits["stateful"] and outcome in ("done", "error"))
        # Whatever is still running is stopped first: then the output ends.
        self._everybody.signal(signal.SIGKILL if over else signal.SIGSTOP)
        self._drain()
        kind, _, detail = outcome.partition(":")
        return Result(
            outcome=kind,
            detail=detail,
            output=self._kept.decode("utf-8", "replace"),
            dropped_bytes=self._dropped,
            cpu_s=self._cpu_s() - used,
            over=over,
        )

    def _handed_over(self, cell: object) -> bool:
        """Give the interpreter a cell; False where it does not take it."""
        while self._said():
            pass  # reports of an earlier cell that was not asked for
        message = wire.pack(cell)
        try:
            return os.write(self._cells, message) == len(message)
        except (BrokenPipeError, BlockingIOError):
            return False

    def _watched(self, began: float, used: float) -> str | None:
        poll = select.poll()
        for fd in (self._host, self._status, self._output):
            poll.register(fd, select.POLLIN)
        deadline = began + self._limits["wall_s"]
        look = began + _LOOK_S
        while True:
            now = time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(min(deadline, look) - now, 0.0) * 1e3 + 1)}
            if self._host in ready:
                # The host says nothing while a cell runs: this is its end.
                return None
            if self._output in ready and not self._drain():
                poll.unregister(self._output)
            if self._status in ready:
                if said := self._said():
                    return _REPORTS.get(said, "ended")
                # Nobody can report any more: the next look will find it dead, or its time will come.
                poll.unregister(self._status)
                look = now + _SOON_S
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= look:
                look = now + _LOOK_S
                if broken := self._silent() or self._broken(used):
                    return broken

    def _said(self) -> bytes | None:
        """The interpreter's next report; empty where it can make none any more, None where there is none."""
        try:
            return os.read(self._status, 1)
        except BlockingIOError:
            return None

    def _silent(self) -> str | None:
        """How the interpreter ended, where it did without a report."""
        pid, status = os.waitpid(self._interpreter, os.WNOHANG)
        if not pid:
            return None
        if not os.WIFSIGNALED(status):
            return f"ended:{os.WEXITSTATUS(status)}"
        number = os.WTERMSIG(status)
        return "cpu" if number == signal.SIGXCPU else f"signal:{signal.Signals(number).name}"

    def _broken(self, used: float) -> str | None:
        self._reap_orphans()
        # First, and cheap: the kernel keeps this limit too, except for root's own processes.
        if self._processes.number() > self._limits["processes"] + 1:
            return "processes"
        usage = self._processes.usage(besides=os.getpid())
        if usage.memory_bytes > self._limits["memory_bytes"]:
            return "memory"
        if usage.cpu_s - used > self._limits["cpu_s"]:
            return "cpu"
        return None

    def _cpu_s(self) -> float:
        return self._processes.usage(besides=os.getpid()).cpu_s

    def _reap_orphans(self) -> None:
        """Bury what was left to pid 1, the interpreter excepted: its end is told by its pipe."""
        try:
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid == self._interpreter:
                    return
                os.waitpid(found.si_pid, 0)
        except ChildProcessError:
            return

    def _drain(self) -> bool:
        """Take some of the output that is there, keep what is within the bound; False where it is closed."""
        for _ in range(_MOST_CHUNKS):
            try:
                chunk = os.read(self._output, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            room = self._limits["output_bytes"] - len(self._kept)
            self._kept += chunk[:room]
            self._dropped += max(len(chunk) - room, 0)
        return True
