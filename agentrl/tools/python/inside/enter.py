"""Enters the sandbox: new namespaces, a file system of what is needed alone, then the warm parent.

Started by the host as a program of its own, with an empty environment and one socket.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn, TypedDict, cast

from . import kernel, wire, zygote
from .wire import DEVICES, SandboxPlan

_ROOT = "/sys"  # any folder that nothing needs: the new root is built on top of it
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
_NOTHING = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
_KEPT_FLAGS = {
    os.ST_NOEXEC: kernel.MS_NOEXEC,
    os.ST_NOATIME: 1024,
    os.ST_NODIRATIME: 2048,
    os.ST_RELATIME: 2**21,
}


class _Mapped(TypedDict):
    user: int | None


def main() -> NoReturn:
    """Enter, or say why not."""
    control = socket.socket(fileno=int(sys.argv[1]))
    plan = cast(SandboxPlan, wire.read(control.fileno()))
    step = "namespaces"
    try:
        kernel.unshare(_NAMESPACES)
        wire.write(control.fileno(), {"unshared": True})
        # The host writes the map of users: only from outside can it hold more than one.
        mapped = cast(_Mapped | None, wire.read(control.fileno()))
        if mapped is None:
            os._exit(1)
        pid = os.fork()
        if pid:
            _wait_for(pid, control)
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
    _be_silent()
    wire.write(control.fileno(), {"ready": True})
    zygote.serve(control, plan["environment"], mapped["user"])


def _be_silent() -> None:
    """From here on nobody reads what this process prints."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _wait_for(child: int, control: socket.socket) -> NoReturn:
    """Live as long as the child does: it is pid 1 of the sandbox, and dies with this process."""
    control.close()
    os.waitpid(child, 0)
    os._exit(0)


def _build(plan: SandboxPlan) -> None:
    """Make a root of what is in the plan, read-only, and go there for good."""
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _ROOT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m")
    for outside, inside in plan["seen"]:
        _show(outside, inside)
    for folder in plan["hidden"]:
        if os.path.isdir(_ROOT + folder):
            kernel.mount("tmpfs", _ROOT + folder, "tmpfs", _NOTHING, "mode=755,size=4k")
    for inside, target in plan["links"]:
        os.makedirs(os.path.dirname(_ROOT + inside), exist_ok=True)
        if not os.path.lexists(_ROOT + inside):
            os.symlink(target, _ROOT + inside)
    _show_devices()
    for folder in ("/proc", "/tmp"):
        os.makedirs(_ROOT + folder, exist_ok=True)
    # Containers that hide parts of /proc allow no other one. The limits of single processes still hold.
    with suppress(PermissionError):
        kernel.mount("proc", f"{_ROOT}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.mount(None, _ROOT, None, _READ_ONLY)
    kernel.pivot_root(_ROOT)
    socket.sethostname("sandbox")


def _show(outside: str, inside: str) -> None:
    """Bind a file or a folder into the new root, read-only with all that is mounted in it."""
    place = _ROOT + inside
    _make_place(place, os.path.isdir(outside))
    kernel.mount(outside, place, None, kernel.MS_BIND | kernel.MS_REC)
    for mounted in _mounts():
        if mounted == place or mounted.startswith(f"{place}/"):
            _freeze(mounted, _READ_ONLY)


def _freeze(place: str, flags: int) -> None:
    """Set flags on a mount. Those that were set outside cannot be taken off in here: they are named again."""
    before = os.statvfs(place).f_flag
    kept = sum(flag for one, flag in _KEPT_FLAGS.items() if before & one)
    kernel.mount(None, place, None, flags | kept)


def _mounts() -> list[str]:
    """Where something is mounted."""
    with open("/proc/self/mountinfo", "rb") as file:
        fields = [line.split()[4] for line in file]
    return [
        os.fsdecode(re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), one)) for one in fields
    ]


def _show_devices() -> None:
    for name in DEVICES:
        place = f"{_ROOT}/dev/{name}"
        _make_place(place, folder=False)
        kernel.mount(f"/dev/{name}", place, None, kernel.MS_BIND)
        # It can be written to all the same, but its times and rights are those of the host's.
        _freeze(place, _READ_ONLY & ~kernel.MS_NODEV)
    os.symlink("/tmp", f"{_ROOT}/dev/shm")


def _make_place(place: str, folder: bool) -> None:
    os.makedirs(place if folder else os.path.dirname(place), exist_ok=True)
    if not folder and not os.path.lexists(place):
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))


if __name__ == "__main__":
    main()
