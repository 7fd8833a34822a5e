"""One session: a supervisor, and the interpreter that it starts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn, cast

from . import kernel, runner, wire
from .supervisor import SessionProcesses, Supervisor
from .usage import ProcessTable
from .wire import SessionLimits

WORK = "/tmp"
CELLS, STATUS = 3, 4
MOST_DESCRIPTORS = 256  # limit of the parents: no higher descriptor is open, so none has to be closed


class Confined:
    """A session inside the sandbox, as pid 1 of its own pid namespace.

    user: the user id of the interpreter; None where the sandbox has only one user.
    """

    def __init__(self, host: int, environment: Mapping[str, str], user: int | None) -> None:
        self._host, self._environment, self._user = host, environment, user

    def run(self) -> None:
        """Serve the host until it closes the socket; then end all processes of the session."""
        kernel.hide_memory(True)
        # A signal from inside reaches pid 1 only where it has a handler; Python has one for SIGINT.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        limits = cast(SessionLimits, wire.read(self._host))
        proc = _own_file_system(limits)
        if limits["network"]:
            wire.hand_over(self._host, kernel.begin_network(own=True))
        processes = ProcessTable(proc)
        mapped = processes.mapped_bytes()

        def confine() -> None:
            runner.confine(limits, mapped, user=self._user)

        def start(cells: int, status: int, output: int) -> int:
            if pid := os.fork():
                return pid
            interpret((cells, status, output), confine, limits, self._environment, proc)

        session_processes = SessionProcesses()
        try:
            Supervisor(self._host, limits, processes, session_processes, start).serve()
        finally:
            session_processes.signal(signal.SIGKILL)
            session_processes.reap()


def _own_file_system(limits: SessionLimits) -> int | None:
    """Mount a writable folder for the session; return a descriptor of its /proc, which is unmounted."""
    kernel.unshare(kernel.CLONE_NEWNS)
    proc = None
    if os.path.ismount("/proc"):
        kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        kernel.unmount("/proc")
        kernel.unmount("/proc")
    size = f"mode=1777,size={limits['files_bytes']},nr_inodes={1024 + limits['files_bytes'] // 16384}"
    kernel.mount("tmpfs", WORK, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    os.chdir(WORK)
    return proc


def _die_first(proc: int | None) -> None:
    """Make this process the first that the kernel kills when memory runs out."""
    if proc is not None:
        kernel.hide_memory(
            False
        )  # /proc of a non-dumpable process belongs to the real root, and only root may write it
        fd = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        os.write(fd, b"1000")
        os.close(fd)


def interpret(
    pipes: tuple[int, int, int],
    confine: Callable[[], None],
    limits: SessionLimits,
    environment: Mapping[str, str],
    proc: int | None = None,
) -> NoReturn:
    """Run the interpreter in the forked child; never returns into the code of the parent.

    pipes: cells, status, output. An error before the first cell is reported instead of READY.
    """
    try:
        # A process group of its own: signals to the own group must not reach the supervisor or the host.
        os.setsid()
        with suppress(PermissionError):  # where a security module forbids it, all other limits still apply
            _die_first(proc)
        keep_only(*pipes)
        try:
            confine()
        except OSError as error:
            os.write(STATUS, str(error).encode())
        else:
            runner.serve(CELLS, STATUS, environment, stateful=limits["stateful"])
    finally:
        os._exit(0)


def keep_only(cells: int, status: int, output: int) -> None:
    """Close all other descriptors: the code must not reach the supervisor or the host through them."""
    devnull = os.open(os.devnull, os.O_RDONLY)
    # First to high numbers, so that none overwrites another.
    high = [os.dup2(fd, 100 + n, inheritable=False) for n, fd in enumerate((devnull, output, cells, status))]
    for fd, number in zip((high[0], high[1], high[1], high[2], high[3]), range(5), strict=True):
        os.dup2(fd, number, inheritable=number < CELLS)
    os.closerange(5, MOST_DESCRIPTORS)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.stdout = sys.stderr = None
