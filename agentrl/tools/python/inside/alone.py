"""A supervisor and its interpreter without a warm parent: in bubblewrap, or with no protection at all.

Started by the host for one session, with one socket. In bubblewrap it is pid 1 and everything else is as in
the sandbox; unprotected, the interpreter leads a process group, and limits are all that holds it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn, cast

from . import kernel, runner, seccomp, wire
from .limits import Limits
from .session import CELLS, STATUS, keep_only
from .supervisor import Everybody, Supervisor
from .usage import Processes
from .zygote import end_with


class Group(Everybody):
    """The interpreter and what it started, as far as that stays in its process group."""

    leader = 0

    def signal(self, number: int) -> None:
        """Send a signal to the group."""
        if self.leader:
            try:
                os.killpg(self.leader, number)
            except (ProcessLookupError, PermissionError):
                return


def main() -> NoReturn:
    """Serve the host until it goes away."""
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path.remove(sys.argv[2])
    host = control.detach()
    end_with(lambda: _serve(host), host)


def _serve(host: int) -> None:
    environment = cast(Mapping[str, str], wire.read(host))
    limits = cast(Limits, wire.read(host))
    walled = os.getpid() == 1
    sys.path += [path for path in (environment.get("PYTHONPATH"),) if path]
    everybody = Everybody() if walled else Group()
    proc = os.open("/proc", os.O_RDONLY) if walled and os.path.ismount("/proc") else None
    processes = Processes(proc)
    mapped = processes.mapped_bytes()

    def start(cells: int, status: int, output: int) -> int:
        if pid := os.fork():
            if isinstance(everybody, Group):
                everybody.leader = pid
            return pid
        os.setpgid(0, 0)
        keep_only(cells, status, output)
        runner.bound(limits, mapped)
        if walled:
            kernel.drop_capabilities()
            seccomp.install()
        runner.serve(CELLS, STATUS, environment, stateful=limits["stateful"])
        os._exit(0)

    try:
        Supervisor(host, limits, processes, everybody, start).serve()
    finally:
        everybody.signal(signal.SIGKILL)
        everybody.reap()


if __name__ == "__main__":
    main()
