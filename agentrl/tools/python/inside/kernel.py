"""System calls that Python does not wrap."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_RT_SIGACTION = {"x86_64": 13, "aarch64": 134}
_SIGNAL_SET_BYTES = 8
# Python ignores these, and raises an exception for a broken pipe and a full file.
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_FIXED_SIGNALS = {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT}
_CAPABILITY_VERSION_3 = 0x20080522
_MOST_CAPABILITIES = 64
_SIOCSIFFLAGS = 0x8914
_IFF_UP_AND_RUNNING = 0x41
_MOST_WAITING = 64

MACHINE = platform.machine()
SUPPORTED = tuple(_CAPSET)

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process (for pids: its next child) into new namespaces."""
    _checked(_libc.unshare(flags), "unshare")


def begin_network(own: bool) -> socket.socket:
    """A socket that listens at 127.0.0.1, at a free port.

    own: in a new network of this process and its children, which has nothing but that address.
    """
    if own:
        unshare(CLONE_NEWNET)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_AND_RUNNING))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(_MOST_WAITING)
    return listener


def setns(fd: int, flags: int) -> None:
    """Move this process (for pids: its next child) into the namespaces of a pidfd."""
    _checked(_libc.setns(fd, flags), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _checked(result, f"mount {kind or 'bind'} on {target}")


def unmount(target: str) -> None:
    """Unmount lazily: files that are open in the mount stay readable."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(folder: str) -> None:
    """Make `folder`, a mount, the root, and unmount the old root."""
    os.chdir(folder)
    _checked(_libc.syscall(_PIVOT_ROOT[MACHINE], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, argument: int, what: str) -> None:
    """prctl(2) with one argument."""
    _checked(_libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0), what)


def die_with_parent(number: int) -> None:
    """Request a signal for the end of the parent."""
    prctl(_PR_SET_PDEATHSIG, number, "prctl PDEATHSIG")


def reset_signals() -> None:
    """Reset every signal but SIGINT to its default in a new Python, also those that a parent ignored."""
    for number in signal.valid_signals() - _FIXED_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number in _IGNORED_BY_PYTHON else signal.SIG_DFL)
    # The C library reserves these two, so Python cannot reset them; a parent may have ignored them.
    default = bytes(32)  # a zeroed `struct sigaction`, as the kernel has it
    for reserved in (32, 33):
        result = _libc.syscall(_RT_SIGACTION[MACHINE], reserved, default, None, _SIGNAL_SET_BYTES)
        _checked(result, "rt_sigaction")


def hide_memory(hidden: bool) -> None:
    """Forbid, or allow, processes of the same user to read the memory of this one."""
    prctl(_PR_SET_DUMPABLE, int(not hidden), "prctl DUMPABLE")


def forbid_new_privileges() -> None:
    """Disable set-user-id and file capabilities for all programs that this process starts."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1, "prctl NO_NEW_PRIVS")


def install_filter(program: bytes) -> None:
    """Install a seccomp filter, a `struct sock_fprog`, for this process and all of its children."""
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "prctl SECCOMP")


def drop_capabilities() -> None:
    """Drop every capability permanently."""
    for capability in range(_MOST_CAPABILITIES):
        # Beyond the last capability of this kernel prctl returns EINVAL.
        if _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    _libc.prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(_PR_CAP_AMBIENT_CLEAR_ALL), 0, 0, 0)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.syscall(_CAPSET[MACHINE], header, bytes(24)), "capset")
