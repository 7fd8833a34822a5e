"""The warm parent: an interpreter that has imported common modules, and forks sessions.

Consumes: the host's sockets, one for each session, through its own socket. Waits for: that socket only.
Ends: when the host closes the socket, however the host ended; the kernel then kills every session.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from . import kernel, seccomp, wire
from .session import MOST_DESCRIPTORS, Confined


def preload(modules: Sequence[str]) -> None:
    """Import modules now, so that sessions inherit them."""
    for name in modules:
        importlib.import_module(name)
    # Pid 1 of a session ignores signals from inside only where it has no handler for them; and signals that
    # the parent of the host ignores must end the interpreter.
    kernel.reset_signals()
    # A collection in a child would write to, and so copy, every object that it shares with this parent.
    gc.collect()
    gc.freeze()


def serve(control: socket.socket, environment: Mapping[str, str], user: int | None) -> NoReturn:
    """Fork a session for every socket that the host sends. Does not return."""
    # The kernel reaps ended sessions.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_DESCRIPTORS, MOST_DESCRIPTORS))
    seccomp.prepare()
    own_pidfd = os.pidfd_open(os.getpid())
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            os._exit(0)
        for fd in fds:
            _begin(fd, own_pidfd, control, environment, user)
            os.close(fd)


def _begin(
    host: int, own_pidfd: int, control: socket.socket, environment: Mapping[str, str], user: int | None
) -> None:
    try:
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
    except OSError as error:
        with suppress(OSError):  # the host's end may be closed, and this process serves other sessions, too
            wire.write(host, {"outcome": "unavailable", "detail": str(error)})
        pid = -1
    if pid == 0:
        os.close(own_pidfd)
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with(Confined(host, environment, user).run, host)
    # The next child of this process must not start in that namespace.
    kernel.setns(own_pidfd, kernel.CLONE_NEWPID)


def end_with(run: Callable[[], None], host: int) -> NoReturn:
    """Run a function and exit; an error is sent to the host."""
    try:
        run()
    except (OSError, ValueError) as error:
        with suppress(OSError):
            wire.write(host, {"outcome": "unavailable", "detail": str(error)})
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(0)
