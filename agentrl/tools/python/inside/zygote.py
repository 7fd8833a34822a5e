"""The warm parent: an interpreter that has imported what code often needs, and forks sessions.

Consumes: the host's sockets, one for each session, through its own. Waits for: that socket alone.
Ends: when the host closes it, however the host ended; the kernel then kills every session.
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
    """Import now what every session would import later."""
    for name in modules:
        importlib.import_module(name)
    # Pid 1 of a session is deaf to signals from inside only where it has no handler for them; and the
    # interpreter is to end by those that whoever started the host ignores.
    kernel.forget_signals()
    # A collection in a child would touch, and so copy, every object that it shares with this parent.
    gc.collect()
    gc.freeze()


def serve(control: socket.socket, environment: Mapping[str, str], user: int | None) -> NoReturn:
    """Fork a session for every socket that comes. Does not return."""
    # Sessions that have ended are buried by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_DESCRIPTORS, MOST_DESCRIPTORS))
    seccomp.prepare()
    here = os.pidfd_open(os.getpid())
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            os._exit(0)
        for fd in fds:
            _begin(fd, here, control, environment, user)
            os.close(fd)


def _begin(
    host: int, here: int, control: socket.socket, environment: Mapping[str, str], user: int | None
) -> None:
    try:
        kernel.unshare(kernel.CLONE_NEWPID)
        pid = os.fork()
    except OSError as error:
        with suppress(OSError):  # it may be gone, and this process serves all others too
            wire.write(host, {"outcome": "unavailable", "detail": str(error)})
        pid = -1
    if pid == 0:
        os.close(here)
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with(Confined(host, environment, user).run, host)
    # The next child of this process is not to be born into that namespace.
    kernel.setns(here, kernel.CLONE_NEWPID)


def end_with(run: Callable[[], None], host: int) -> NoReturn:
    """Do the last thing that this process does; what breaks is told to the host."""
    try:
        run()
    except (OSError, ValueError) as error:
        with suppress(OSError):
            wire.write(host, {"outcome": "unavailable", "detail": str(error)})
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(0)
