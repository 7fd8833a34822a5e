"""Runs one server and outlives it: whatever the server started is dead when this program ends.

    python -I -S guard.py PARENT GRACE_S COMMAND [ARGUMENT ...]

The server gets the standard streams and exactly the environment that this program was started with. When it
ends, when SIGTERM comes, or when the process PARENT dies, all its descendants are asked to end, and killed
GRACE_S seconds later, the server first: also those that left the process group, since orphans become children
of this program (a "subreaper"). PARENT counts as dead when the thread that started this program ends.

It exits with the server's code, 128 + N where signal N ended the server, 0 where it was asked to end.

Linux only. It imports nothing of agentrl: a server should not wait for that.
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
"""How long descendants may take to end by themselves after SIGTERM, where nobody says otherwise."""
CLEARING_S = 0.3
"""What is left when the server has been killed may take so long to clear up after it."""
GIVE_UP_S = 2.0
"""After SIGKILL only what the kernel cannot end is left; nobody waits longer than this for it."""
NOT_STARTED = 127
SIGNALLED = 128
_LOOK_AGAIN_S = 0.01
_END = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_libc = ctypes.CDLL(None, use_errno=True)


def command(server: Sequence[str], grace_s: float = GRACE_S) -> list[str]:
    """The command line that runs `server` (an absolute path and arguments) guarded for this process."""
    return [sys.executable, "-I", "-S", str(Path(__file__)), str(os.getpid()), str(grace_s), *server]


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _start(command: list[str], environment: dict[bytes, bytes]) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    # Should the guard itself be killed, the server at least goes with it.
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
    """What the kernel handed over: Python may have put a locale of its own into os.environ."""
    pairs = Path("/proc/self/environ").read_bytes().split(b"\0")
    return {name: value for name, _, value in (pair.partition(b"=") for pair in pairs if pair)}


def _reaped() -> Iterator[tuple[int, int]]:
    """Every child that has ended, with its exit status; the processes of nobody's are among them."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            yield pid, os.waitstatus_to_exitcode(status)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    # A process may end while it is looked at.
    with suppress(OSError):
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _end_all(sign: signal.Signals, within_s: float) -> bool:
    """Send `sign` to all descendants until none is left; False where some are after that time."""
    deadline = time.monotonic() + within_s
    sent: set[int] = set()
    while left := _descendants(os.getpid()):
        for pid in left:
            # Asked once, killed until it is dead.
            if sign is signal.SIGKILL or pid not in sent:
                with suppress(OSError):
                    os.kill(pid, sign)
        sent.update(left)
        list(_reaped())
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


def _kill_first(server: int) -> None:
    """Kill the server before the others: some wait for its end to clear up after it, its semaphores say."""
    if server in _descendants(os.getpid()):
        os.kill(server, signal.SIGKILL)
        _end_all(signal.SIGTERM, CLEARING_S)


def main(arguments: list[str]) -> int:
    """Guard until the server ends or nobody needs it any more; returns the exit code."""
    parent, grace_s, server_command = int(arguments[0]), float(arguments[1]), arguments[2:]
    watched = {signal.SIGCHLD, *_END}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        return NOT_STARTED
    server = _start(server_command, _environment())
    # Only the server and what it starts hold its pipes: their end is seen when they are gone.
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
