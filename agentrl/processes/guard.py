"""Runs one server and ends all of its descendants: none is left when this program ends.

    python -I -S guard.py PARENT GRACE_S COMMAND [ARGUMENT ...]

The server inherits the standard streams and exactly the environment of this program. When the server ends, on
SIGTERM, or when the process PARENT dies, all descendants get SIGTERM, and SIGKILL GRACE_S seconds later, the
server first: also those that left the process group, since orphans become children of this program (a
"subreaper"). PARENT counts as dead when the thread that started this program ends.

The exit code is the server's, 128 + N where signal N ended the server, 0 after SIGTERM.

Linux only. It imports nothing of agentrl, so that the server starts without that delay.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

# From linux/prctl.h.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

GRACE_S = 1.0
"""The default time for descendants to end after SIGTERM."""
CLEANUP_S = 0.3
"""The time for the other descendants to clean up after the server has been killed."""
GIVE_UP_S = 2.0
"""The time to wait after SIGKILL; only processes that the kernel cannot end outlast it."""
NOT_STARTED = 127
SIGNALLED = 128
_POLL_S = 0.01
_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_libc = ctypes.CDLL(None, use_errno=True)


def command(server: Sequence[str], grace_s: float = GRACE_S) -> list[str]:
    """The command line that guards `server` (an absolute path and arguments) for this process."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), str(grace_s), *server]


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _start(command: list[str], environment: dict[bytes, bytes]) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    # If the guard itself is killed, the kernel kills the server, too.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(NOT_STARTED)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
        os._exit(NOT_STARTED)


def _environment() -> dict[bytes, bytes]:
    """The environment from the kernel: Python may have set a locale of its own in os.environ."""
    pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {name: value for name, _, value in (pair.partition(b"=") for pair in pairs if pair)}


def _reaped() -> Iterator[tuple[int, int]]:
    """Every child that has ended, with its exit status; adopted orphans included."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def descendants(pid: int) -> list[int]:
    """The children of a process and theirs; none that has left them, unless it has come to one of these."""
    pids: list[int] = []
    # A process may end while its children are listed.
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                pids += [child, *descendants(child)]
    return pids


def _end_all(signum: signal.Signals, within_s: float) -> bool:
    """Send `signum` to all descendants until none is left; False where some are left after `within_s`."""
    deadline = time.monotonic() + within_s
    signalled: set[int] = set()
    while pids := descendants(os.getpid()):
        for pid in pids:
            # SIGTERM is sent once, SIGKILL until the process is dead.
            if signum is signal.SIGKILL or pid not in signalled:
                with suppress(OSError):
                    os.kill(pid, signum)
        signalled.update(pids)
        list(_reaped())
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _kill_first(server: int) -> None:
    """Kill the server first: some descendants wait for its end to clean up, such as its semaphores."""
    if server in descendants(os.getpid()):
        os.kill(server, signal.SIGKILL)
        _end_all(signal.SIGTERM, CLEANUP_S)


def main(arguments: list[str]) -> int:
    """Guard until the server ends, SIGTERM comes or the parent dies; returns the exit code."""
    parent, grace_s, server_command = int(arguments[0]), float(arguments[1]), arguments[2:]
    watched = {signal.SIGCHLD, *_END}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        return NOT_STARTED
    server = _start(server_command, _environment())
    # Only the server and its descendants hold its pipes: readers get EOF once these have ended.
    os.close(0)
    os.close(1)
    code = None
    while code is None and signal.sigwait(watched) not in _END:
        code = dict(_reaped()).get(server)
    if not _end_all(signal.SIGTERM, grace_s):
        _kill_first(server)
        _end_all(signal.SIGKILL, GIVE_UP_S)
    if code is None:
        return 0
    return code if code >= 0 else SIGNALLED - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
