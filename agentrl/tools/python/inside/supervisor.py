"""Pid 1 of a session: starts the interpreter, enforces its limits, and ends all processes of the session.

Every process of the session is a descendant. When pid 1 of a pid namespace ends, the kernel kills the rest;
signals from inside cannot reach it. Between calls of a stateful session all other processes are stopped.

Consumes: cells of code from the host's socket. Waits for: the socket, the interpreter, its output, the next
check of the limits. Ends: when the host closes the socket, or a limit is exceeded.

Code may do anything to its ends of the pipes, at any time: every loop that reads from them is bounded.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import TypedDict

from . import runner, wire
from .usage import ProcessTable
from .wire import SessionLimits

_CHECK_S = 0.05
_LEAST_CHECK_S = 0.01
_GLANCE_S = 0.01
_LEAST_GLANCE_S = 0.001
_BYTES_PER_S = 4e9  # what a core fills of new memory, at most
_SOON_S = 0.002
_IDLE_CHECK_S = 1.0
_CHUNK_BYTES = 65_536
_MOST_CHUNKS = 32  # a flood of output must not block the limits
_CORES = os.cpu_count() or 1
_PAGE_BYTES = 4096
_MOST_BUFFERS = 256  # pipes and sockets: at most some 60 MB of the kernel's memory
_MAX_REPORT_BYTES = 500
_REPORTS = {b"d": "done", b"e": "error"}


class Result(TypedDict):
    """How a cell ended.

    outcome: done, error, timeout, cpu, memory, processes, signal or ended. detail: the signal, the exit
        code, or what took the memory. over: the session ended with it.
    """

    outcome: str
    detail: str
    output: str
    dropped_bytes: int
    cpu_s: float
    over: bool


class SessionProcesses:
    """All processes of a session but this one, which is pid 1 of their namespace."""

    def signal(self, number: int) -> None:
        """Send a signal to all of them in one call; no fork can escape it."""
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            return

    def reap(self) -> None:
        """Wait for the end of all of them, after SIGKILL."""
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


class LimitChecks:
    """Compares what all processes but this one take with the limits of their session.

    glance_s: the time until the next comparison: the less is free, the sooner.
    """

    def __init__(self, limits: SessionLimits, processes: ProcessTable) -> None:
        self._limits, self._processes = limits, processes
        self.glance_s = _GLANCE_S
        self._check_at = 0.0
        self._charged_s = 0.0
        self.charged_cpu_s()

    def charged_cpu_s(self) -> float:
        """CPU seconds since the last call, which are a cell's."""
        used = self._processes.usage(excluded_pid=os.getpid(), enough_bytes=sys.maxsize).cpu_s
        before, self._charged_s = self._charged_s, used
        return used - before

    def exceeded(self) -> str | None:
        """The limit that they exceed. Their number is compared each time, all else at its own times."""
        began = time.monotonic()
        # First, because it is cheap: the kernel enforces this limit, too, except for processes of root.
        number = self._processes.number() - 1
        if number > self._limits["processes"]:
            return "processes"
        # The kernel enforces the memory of one process.
        taken = self._processes.resident_bytes(excluded_pid=os.getpid()) if number > 1 else 0
        most = self._limits["memory_bytes"]
        if began >= self._check_at or taken > most:
            usage = self._processes.usage(excluded_pid=os.getpid(), enough_bytes=most)
            taken = usage.memory_bytes
            if taken > most:
                return "memory"
            if usage.cpu_s - self._charged_s > self._limits["cpu_s"]:
                return "cpu"
            if self._processes.buffers(excluded_pid=os.getpid()) > _MOST_BUFFERS:
                return f"memory:more than {_MOST_BUFFERS} pipes and sockets"
            self._check_at = began + max(_CHECK_S / max(number, 1), _LEAST_CHECK_S)
        # Until the next glance they cannot fill what is free; glances take at most a half of a core.
        soonest_s = max(_LEAST_GLANCE_S, time.monotonic() - began)
        until_full_s = (most - taken) / _BYTES_PER_S / max(min(number, _CORES), 1)
        self.glance_s = min(max(until_full_s, soonest_s), _GLANCE_S)
        return None


class Supervisor:
    """Runs the cells of one session.

    start: forks the interpreter with its ends of the pipes and returns its process id.

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
        self._host, self._limits, self._session_processes = host, limits, session_processes
        cells, self._cells = os.pipe()
        self._status, status = os.pipe()
        self._output, output = os.pipe()
        self._interpreter = start(cells, status, output)
        for fd in (cells, status, output):
            os.close(fd)
        # No code of a model has run yet: a failure up to here is the world's, and this report can be trusted.
        if (report := os.read(self._status, _MAX_REPORT_BYTES)) != runner.READY:
            raise OSError(f"the interpreter did not start: {report.decode('utf-8', 'replace')}")
        for fd in (self._cells, self._status, self._output):
            # Untrusted code holds the other ends: nothing here may wait for them.
            os.set_blocking(fd, False)
        self._buffer = bytearray()
        self._dropped = 0
        self._checks = LimitChecks(limits, processes)
        self._unsent = memoryview(b"")

    def serve(self) -> None:
        """Run cells until the host closes the socket or the session ends."""
        over = False
        while not over and (cell := self._next_cell()) is not None:
            result = self._run(cell)
            if result is None:
                return
            over = result["over"]
            wire.write(self._host, result)

    def _next_cell(self) -> object | None:
        """Wait for a cell; None where the host closes the socket.

        Should stopped code continue, it is stopped again at every check, and its usage in between is counted.
        """
        poll = select.poll()
        poll.register(self._host, select.POLLIN)
        while not poll.poll(_IDLE_CHECK_S * 1e3):
            self._reap_orphans()
            over = self._checks.exceeded() is not None
            self._session_processes.signal(signal.SIGKILL if over else signal.SIGSTOP)
        return wire.read(self._host)

    def _run(self, cell: object) -> Result | None:
        """Run one cell; None where the host closes the socket meanwhile."""
        self._buffer.clear()
        self._dropped = 0
        self._drop_reports()
        self._unsent = memoryview(wire.pack(cell))
        self._session_processes.signal(signal.SIGCONT)
        outcome = self._watch()
        if outcome is None:
            return None
        over = not (self._limits["stateful"] and outcome in ("done", "error"))
        # Stop all processes first: then no more output is written.
        self._session_processes.signal(signal.SIGKILL if over else signal.SIGSTOP)
        self._drain(_most_reads(self._output))
        kind, _, detail = outcome.partition(":")
        return Result(
            outcome=kind,
            detail=detail,
            output=self._buffer.decode("utf-8", "replace"),
            dropped_bytes=self._dropped,
            cpu_s=self._checks.charged_cpu_s(),
            over=over,
        )

    def _drop_reports(self) -> None:
        """Drop unexpected reports, up to the capacity of the pipe."""
        for _ in range(_most_reads(self._status)):
            try:
                if not os.read(self._status, _CHUNK_BYTES):
                    return
            except BlockingIOError:
                return

    def _send(self) -> bool:
        """Write as much of the cell as the pipe of the interpreter takes now; False where it is closed."""
        try:
            self._unsent = self._unsent[os.write(self._cells, self._unsent) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return True

    def _watch(self) -> str | None:
        poll = select.poll()
        for fd in (self._host, self._status, self._output):
            poll.register(fd, select.POLLIN)
        poll.register(self._cells, select.POLLOUT)
        began = time.monotonic()
        deadline, glance = began + self._limits["wall_s"], began + _GLANCE_S
        while True:
            now = time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(min(deadline, glance) - now, 0.0) * 1e3)}
            if self._host in ready:
                # The host sends nothing while a cell runs: it has closed the socket.
                return None
            if self._cells in ready and not self._send():
                return "ended"
            if self._cells in ready and not self._unsent:
                poll.unregister(self._cells)
            if self._output in ready and not self._drain(_MOST_CHUNKS):
                poll.unregister(self._output)
            if self._status in ready:
                if report := self._report():
                    return _REPORTS.get(report, "ended")
                # The pipe is closed: the next check finds the interpreter dead, or the deadline comes.
                poll.unregister(self._status)
                glance = now + _SOON_S
            now = time.monotonic()
            if now >= deadline:
                return "timeout"
            if now >= glance:
                self._reap_orphans()
                if failure := self._unreported_end() or self._checks.exceeded():
                    return failure
                glance = time.monotonic() + self._checks.glance_s

    def _report(self) -> bytes | None:
        """The interpreter's next report; empty where its pipe is closed, None where there is none yet."""
        try:
            return os.read(self._status, 1)
        except BlockingIOError:
            return None

    def _unreported_end(self) -> str | None:
        """The outcome of an interpreter that ended without a report."""
        pid, status = os.waitpid(self._interpreter, os.WNOHANG)
        if not pid:
            return None
        if not os.WIFSIGNALED(status):
            return f"ended:{os.WEXITSTATUS(status)}"
        number = os.WTERMSIG(status)
        return "cpu" if number == signal.SIGXCPU else f"signal:{_name(number)}"

    def _reap_orphans(self) -> None:
        """Reap orphans of pid 1 except the interpreter, whose end its pipe reports."""
        try:
            while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if child.si_pid == self._interpreter:
                    return
                os.waitpid(child.si_pid, 0)
        except ChildProcessError:
            return

    def _drain(self, most_reads: int) -> bool:
        """Read some of the pending output and keep it up to the bound; False where the pipe is closed."""
        for _ in range(most_reads):
            try:
                chunk = os.read(self._output, _CHUNK_BYTES)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            num_free_bytes = self._limits["output_bytes"] - len(self._buffer)
            self._buffer += chunk[:num_free_bytes]
            self._dropped += max(len(chunk) - num_free_bytes, 0)
        return True


def _most_reads(pipe: int) -> int:
    """The number of reads that empty a pipe: each of its pages may be a packet of its own (O_DIRECT)."""
    if sys.platform != "linux":
        return _MOST_CHUNKS
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) // _PAGE_BYTES + 1


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have no name
        return f"signal {number}"
