"""A filter on system calls, as a program for the kernel's BPF machine (seccomp(2), Linux >= 3.17).

The namespaces isolate; the filter reduces the attack surface of the kernel: system calls that an interpreter
never needs fail with EPERM, and those newer than this list with ENOSYS.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from functools import lru_cache

from .kernel import MACHINE, forbid_new_privileges, install_filter

# name: (x86_64, aarch64); None = the machine has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "pidfd_getfd": (438, 438),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # The network. Pairs of connected sockets stay allowed; a bound socket could be reached by other sessions.
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "setsockopt": (54, 208),
    # Memory that no limit counts, and memory that is shared between processes.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    # A timer's signal could continue processes that the supervisor stopped.
    "timer_create": (222, 107),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    # Parts of the kernel with a history of vulnerabilities.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    # The machine itself.
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "iopl": (172, None),
    "ioperm": (173, None),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
}
# Allowed for the calling process only, which is pid 0: they could also change limits and cores of other
# processes of the same user, and unless the host is root the supervisor is one of these.
ONLY_ITSELF = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}
# clone3 passes its flags behind a pointer, which a filter cannot read; after ENOSYS the C library uses clone.
CLONE3 = 435
CLONE = {"x86_64": 56, "aarch64": 220}
# Shared memory is not counted in any process, unless it is backed by files, which are bounded.
MMAP = {"x86_64": 9, "aarch64": 222}
_SHARED_WITHOUT_A_FILE = 0x01 | 0x20
NEWEST_CALL = 462
_NEW_NAMESPACES = 0x7E020080

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _ABOVE, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x35, 0x25, 0x45, 0x06, 0x54
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40


def program(machine: str = MACHINE) -> bytes:
    """The filter's instructions.

    Raises:
        KeyError: there is no table for this machine.
    """
    column, architecture = _ARCHITECTURES[machine]
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        steps += _if(_AT_LEAST, _X32, _KILL)
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            steps += _if(_EQUAL, number, _ERRNO | errno.EPERM)
    for number in (numbers[column] for numbers in ONLY_ITSELF.values()):
        steps += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, 0)]
        steps += [(_RETURN, 0, 0, _ERRNO | errno.EPERM), (_LOAD, 0, 0, _NUMBER)]
    steps += [(_EQUAL, 0, 5, MMAP[machine]), (_LOAD, 0, 0, _FOURTH_ARGUMENT)]
    steps += [
        (_AND, 0, 0, _SHARED_WITHOUT_A_FILE),
        *_if(_EQUAL, _SHARED_WITHOUT_A_FILE, _ERRNO | errno.EPERM),
    ]
    steps.append((_LOAD, 0, 0, _NUMBER))
    steps += _if(_EQUAL, CLONE3, _ERRNO | errno.ENOSYS)
    steps += _if(_ABOVE, NEWEST_CALL, _ERRNO | errno.ENOSYS)
    steps += [(_EQUAL, 0, 3, CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    steps += _if(_ANY_BIT, _NEW_NAMESPACES, _ERRNO | errno.EPERM)
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _if(test: int, value: int, then: int) -> list[tuple[int, int, int, int]]:
    return [(test, 0, 1, value), (_RETURN, 0, 0, then)]


def prepare() -> None:
    """Compile the filter now; forked children inherit it."""
    _compiled()


def install() -> None:
    """Install the filter for this process and all of its children; it cannot be removed."""
    forbid_new_privileges()
    code = _compiled()
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(code))
    install_filter(header)


@lru_cache(maxsize=1)
def _compiled() -> ctypes.Array[ctypes.c_char]:
    """Compiled once, in the warm parent."""
    code = program()
    return ctypes.create_string_buffer(code, len(code))
