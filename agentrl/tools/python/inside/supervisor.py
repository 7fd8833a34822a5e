"""Pid 1 of a session: starts the interpreter, holds it to its limits, and ends everything in it.

Every process of the session is a descendant. When pid 1 of a pid namespace ends, the kernel kills the rest;
signals from inside cannot reach it. Between calls of a stateful session all others are stopped.

Consumes: cells of code from the host's socket. Waits for: the socket, the interpreter, its output, the next
look at the limits. Ends: when the host closes the socket, or a limit is broken.

Code may do anything to its ends of the pipes, at any time: no loop here goes on for as long as it writes.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from typing import TypedDict

from . import runner, wire
from .usage import ProcessTable
from .wire import SessionLimits

_LOOK_S = 0.05
_SOON_S = 0.002
_IDLE_LOOK_S = 1.0
_CHUNK_BYTES = 65_536
_MOST_CHUNKS = 32  # a flood must not keep the supervisor from its other duties; a pipe holds less
_MOST_WORDS = 500
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


class SessionProcesses:
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

    Raises:
        OSError: the interpreter did not start.
    """

    def __init__(
        self,
        host: int,
        limits: SessionLimits,
        processes: ProcessTable,
        session_processes: SessionProcesses,
        start: Callable[[int, int, int], int],
    ) -> None:
        self._host, self._limits, self._processes, self._session_processes = (
            host,
            limits,
            processes,
            session_processes,
        )
        cells, self._cells = os.pipe()
        self._status, status = os.pipe()
        self._output, output = os.pipe()
        self._interpreter = start(cells, status, output)
        for fd in (cells, status, output):
            os.close(fd)
        # No line of a model has run yet: what breaks until now is the world's doing, and this is true.
        if (said := os.read(self._status, _MOST_WORDS)) != runner.READY:
            raise OSError(f"the interpreter did not start: {said.decode('utf-8', 'replace')}")
        for fd in (self._cells, self._status, self._output):
            # The other ends are in untrusted hands: nothing here may wait for them.
            os.set_blocking(fd, False)
        self._kept = bytearray()
        self._dropped = 0
        self._untaken = memoryview(b"")
        self._used = self._cpu_s()

    def serve(self) -> None:
        """Run cells until the host goes away or the session is over."""
        over = False
        while not over and (cell := self._next_cell()) is not None:
            result = self._run(cell)
            if result is None:
                return
            over = result["over"]
            wire.write(self._host, result)

    def _next_cell(self) -> object | None:
        """Wait for a cell; None where the host goes away.

        Code that was stopped can have itself continued (by a timer, by the end of a child). It is stopped
        again and again, and what it uses up meanwhile is counted.
        """
        poll = select.poll()
        poll.register(self._host, select.POLLIN)
        while not poll.poll(_IDLE_LOOK_S * 1e3):
            self._session_processes.signal(signal.SIGKILL if self._broken() else signal.SIGSTOP)
        return wire.read(self._host)

    def _run(self, cell: object) -> Result | None:
        """Run one cell; None where the host went away meanwhile."""
        self._kept.clear()
        self._dropped = 0
        self._forget_reports()
        self._untaken = memoryview(wire.pack(cell))
        self._session_processes.signal(signal.SIGCONT)
        outcome = self._watched()
        if outcome is None:
            return None
        over = not (self._limits["stateful"] and outcome in ("done", "error"))
        # Whatever is still running is stopped first: then the output ends.
        self._session_processes.signal(signal.SIGKILL if over else signal.SIGSTOP)
        self._drain()
        kind, _, detail = outcome.partition(":")
        before, self._used = self._used, self._cpu_s()
        return Result(
            outcome=kind,
            detail=detail,
            output=self._kept.decode("utf-8", "replace"),
            dropped_bytes=self._dropped,
            cpu_s=self._used - before,
            over=over,
        )

    def _forget_reports(self) -> None:
        """Drop what was reported and not asked for, as much as a pipe holds."""
        for _ in range(_MOST_CHUNKS):
            try:
                if not os.read(self._status, _CHUNK_BYTES):
                    return
            except BlockingIOError:
                return

    def _hand_over(self) -> bool:
        """Give the interpreter as much of the cell as its pipe takes now; False where it is closed."""
        try:
            self._untaken = self._untaken[os.write(self._cells, self._untaken) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return True

    def _watched(self) -> str | None:
        poll = select.poll()
        for fd in (self._host, self._status, self._output):
            poll.register(fd, select.POLLIN)
        poll.register(self._cells, select.POLLOUT)
        began = time.monotonic()
        deadline, look = began + self._limits["wall_s"], began + _LOOK_S
        while True:
            now = time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(min(deadline, look) - now, 0.0) * 1e3 + 1)}
            if self._host in ready:
                # The host says nothing while a cell runs: this is its end.
                return None
            if self._cells in ready and not self._hand_over():
                return "ended"
            if self._cells in ready and not self._untaken:
                poll.unregister(self._cells)
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
                if broken := self._silent() or self._broken():
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
        return "cpu" if number == signal.SIGXCPU else f"signal:{_name(number)}"

    def _broken(self) -> str | None:
        self._reap_orphans()
        # First, and cheap: the kernel keeps this limit too, except for root's own processes.
        if self._processes.number() > self._limits["processes"] + 1:
            return "processes"
        usage = self._processes.usage(besides=os.getpid())
        if usage.memory_bytes > self._limits["memory_bytes"]:
            return "memory"
        if usage.cpu_s - self._used > self._limits["cpu_s"]:
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


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have no name
        return f"signal {number}"
