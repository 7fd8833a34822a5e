"""Enters the sandbox: creates the namespaces and a minimal file system, then becomes the warm parent.

The host starts it as a subprocess, with an empty environment and one socket.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn, TypedDict, cast

from . import kernel, wire, zygote
from .wire import DEVICES, SandboxPlan

_ROOT = "/sys"  # any unused folder: the new root is mounted over it
_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
_READ_ONLY = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
_EMPTY = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
_LOCKED_FLAGS = {
    os.ST_NOEXEC: kernel.MS_NOEXEC,
    os.ST_NOATIME: 1024,
    os.ST_NODIRATIME: 2048,
    os.ST_RELATIME: 2**21,
}


class _Mapped(TypedDict):
    user: int | None


def main() -> NoReturn:
    """Enter, or send the reason of the failure."""
    control = socket.socket(fileno=int(sys.argv[1]))
    plan = cast(SandboxPlan, wire.read(control.fileno()))
    step = "namespaces"
    try:
        host = _host(int(sys.argv[3]))
        kernel.unshare(_NAMESPACES)
        wire.write(control.fileno(), {"unshared": True})
        # The host writes the user map: only from outside may it hold more than one id.
        mapped = cast(_Mapped | None, wire.read(control.fileno()))
        if mapped is None:
            os._exit(1)
        pid = os.fork()
        if pid:
            _wait_for(pid, control, host)
        os.close(host)
        step = "files"
        kernel.die_with_parent(signal.SIGKILL)
        _build(plan)
        step = "packages"
        sys.path[:] = [path for path in sys.path if path != sys.argv[2]] + [plan["packages"]]
        os.environ.update(plan["environment"])
        zygote.preload(plan["preload"])
    except (OSError, ImportError) as error:
        wire.write(control.fileno(), {"refused": step, "detail": str(error)})
        os._exit(1)
    _discard_stderr()
    wire.write(control.fileno(), {"ready": True})
    zygote.serve(control, plan["environment"], mapped["user"])


def _discard_stderr() -> None:
    """Redirect stderr to /dev/null: from here on the host does not read it."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    os.close(devnull)


def _host(pid: int) -> int:
    """A descriptor that becomes readable when the host ends; exits where it has ended already."""
    try:
        host = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != pid:
        os._exit(1)
    return host


def _wait_for(child: int, control: socket.socket, host: int) -> NoReturn:
    """Wait for the end of the child or of the host, then exit.

    The child is pid 1 of the sandbox, and dies with this process. The socket does not show the end of a host
    that forked: the children of the host have it open, too.
    """
    control.close()
    select.select([os.pidfd_open(child), host], [], [])
    os._exit(0)


def _build(plan: SandboxPlan) -> None:
    """Mount the files of the plan in a new root, read-only, and make it the root."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m")
    for outside, inside in plan["mounts"]:
        _bind(outside, inside)
    for folder in plan["hidden"]:
        if os.path.isdir(_ROOT + folder):
            kernel.mount("tmpfs", _ROOT + folder, "tmpfs", _EMPTY, "mode=755,size=4k")
    for inside, target in plan["links"]:
        os.makedirs(os.path.dirname(_ROOT + inside), exist_ok=True)
        if not os.path.lexists(_ROOT + inside):
            os.symlink(target, _ROOT + inside)
    _bind_devices()
    for folder in ("/proc", "/tmp"):
        os.makedirs(_ROOT + folder, exist_ok=True)
    # Containers that mask parts of /proc forbid to mount another. Limits per process still apply.
    with suppress(PermissionError):
        kernel.mount("proc", f"{_ROOT}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount(None, _ROOT, None, _READ_ONLY)
    kernel.pivot_root(_ROOT)
    socket.sethostname("sandbox")


def _bind(outside: str, inside: str) -> None:
    """Bind a file or a folder into the new root, read-only, with all mounts below it."""
    place = _ROOT + inside
    _make_place(place, os.path.isdir(outside))
    kernel.mount(outside, place, None, kernel.MS_BIND | kernel.MS_REC)
    for mounted in _mounts():
        if mounted == place or mounted.startswith(f"{place}/"):
            _freeze(mounted, _READ_ONLY)


def _freeze(place: str, flags: int) -> None:
    """Set flags on a mount. Flags of the host's mount are locked in this namespace: they are repeated."""
    before = os.statvfs(place).f_flag
    locked = sum(flag for status, flag in _LOCKED_FLAGS.items() if before & status)
    kernel.mount(None, place, None, flags | locked)


def _mounts() -> list[str]:
    """All mount points."""
    with open("/proc/self/mountinfo", "rb") as file:
        fields = [line.split()[4] for line in file]
    return [
        os.fsdecode(re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), field)) for field in fields
    ]


def _bind_devices() -> None:
    for name in DEVICES:
        place = f"{_ROOT}/dev/{name}"
        _make_place(place, folder=False)
        kernel.mount(f"/dev/{name}", place, None, kernel.MS_BIND)
        # A device stays writable when read-only; its times and permissions, the host's, do not.
        _freeze(place, _READ_ONLY & ~kernel.MS_NODEV)
    os.symlink("/tmp", f"{_ROOT}/dev/shm")


def _make_place(place: str, folder: bool) -> None:
    os.makedirs(place if folder else os.path.dirname(place), exist_ok=True)
    if not folder and not os.path.lexists(place):
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))


if __name__ == "__main__":
    main()
