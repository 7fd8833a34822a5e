"""A supervisor and its interpreter without a warm parent: in bubblewrap, or with no protection at all.

The host starts it for one session, with one socket. In bubblewrap it is pid 1, and all else is as in the
sandbox of namespaces; unprotected, the interpreter leads a process group, and only limits confine it.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn, cast

from . import kernel, runner, seccomp, wire
from .session import MOST_DESCRIPTORS, Confined, interpret
from .supervisor import SessionProcesses, Supervisor
from .usage import ProcessTable
from .wire import SessionLimits
from .zygote import end_with


class InterpreterGroup(SessionProcesses):
    """The interpreter and its children, as far as they stay in its process group."""

    leader = 0

    def signal(self, number: int) -> None:
        """Send a signal to the group."""
        if self.leader:
            try:
                os.killpg(self.leader, number)
            except (ProcessLookupError, PermissionError):
                return


def main() -> NoReturn:
    """Serve the host until it closes the socket."""
    host = int(sys.argv[1])
    sys.path.remove(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_DESCRIPTORS, MOST_DESCRIPTORS))
    environment = cast(Mapping[str, str], wire.read(host))
    sys.path += environment["PYTHONPATH"].split(os.pathsep)
    if os.getpid() == 1:
        seccomp.prepare()
        kernel.reset_signals()
        # The folder of this program must be invisible to the model.
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.unmount(f"{sys.argv[2]}/inside")
        end_with(Confined(host, environment, None).run, host)
    end_with(lambda: _serve_unprotected(host, environment), host)


def _serve_unprotected(host: int, environment: Mapping[str, str]) -> None:
    limits = cast(SessionLimits, wire.read(host))
    if limits["network"]:
        wire.hand_over(host, kernel.begin_network(own=False))
    processes = ProcessTable(None)
    mapped = processes.mapped_bytes()
    group = InterpreterGroup()

    def start(cells: int, status: int, output: int) -> int:
        group.leader = os.fork()
        if group.leader == 0:
            interpret((cells, status, output), lambda: runner.bound(limits, mapped), limits, environment)
        return group.leader

    try:
        Supervisor(host, limits, processes, group, start).serve()
    finally:
        group.signal(signal.SIGKILL)
        group.reap()


if __name__ == "__main__":
    main()
