"""The system calls that code may make, with the reason of each group; `seccomp` makes the filter of them.

A call that is in none of them is refused: it is not needed by CPython, numpy, sympy or the programs of a
shell, or it takes what the whole machine or the user has only so much of:

    leases, dnotify             fcntl F_SETLEASE, F_NOTIFY: they stop, or hear of, the host's own opens
    flock                       an exclusive lock needs no right to write: it could be taken on a host's file
    io_setup                    fs.aio-max-nr
    epoll                       fs.epoll.max_user_watches, counted for the user; asyncio falls back to poll
    inotify, fanotify           fs.inotify.max_user_watches and the like
    F_SETPIPE_SZ, mknod         fs.pipe-user-pages-soft; the supervisor counts pipes, and sees no FIFO
    sendmsg                     descriptors in flight: a limit of the user, and open files that no process has
    MAP_HUGETLB                 vm.nr_hugepages
    mlock, memfd, shm, msg, sem memory and identifiers that no limit of a session counts
    add_key, bpf, perf, io_uring  locked memory and keys of the user; parts of the kernel with many holes
    timers of the kernel        their signals could continue processes that the supervisor has stopped
    statmount, statfs, sysinfo  mounts, disks, memory and load of the host
    readahead, fadvise, mincore the host's page cache; what others have read
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Numbers = tuple[int | None, int | None]
"""The numbers of a call on (x86_64, aarch64); None = that machine has no such call."""


class ArgumentCheck(NamedTuple):
    """A condition on one argument: its lower 32 bits, as far as `mask` has them, are one of `values`."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


Alternatives = tuple[tuple[ArgumentCheck, ...], ...]
"""A call is allowed where all checks of at least one alternative hold."""

ALLOWED: Mapping[str, Mapping[str, Numbers]] = {
    "descriptors: read, write, wait for and copy what is open": {
        "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "pread64": (17, 67),
        "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69),
        "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "sendfile": (40, 71),
        "copy_file_range": (326, 285),
        "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
        "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "close_range": (436, 436),
        "pipe": (22, None), "pipe2": (293, 59), "ioctl": (16, 29), "fcntl": (72, 25),
    },
    "connected pairs of sockets: asyncio wakes its loop through one": {
        "socketpair": (53, 199), "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210),
        "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
    },
    "files: their names, contents and attributes; only /tmp can be written": {
        "open": (2, None), "openat": (257, 56), "creat": (85, None), "stat": (4, None), "fstat": (5, 80),
        "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None),
        "faccessat": (269, 48), "faccessat2": (439, 439), "getdents": (78, None), "getdents64": (217, 61),
        "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166),
        "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47),
        "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
        "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None), "linkat": (265, 37),
        "unlink": (87, None), "unlinkat": (263, 35), "symlink": (88, None), "symlinkat": (266, 36),
        "readlink": (89, None), "readlinkat": (267, 78), "chmod": (90, None), "fchmod": (91, 52),
        "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55),
        "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
        "futimesat": (261, None), "utimensat": (280, 88),
    },
    "extended attributes: shutil.copy2 and cp -p copy them": {
        "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
        "llistxattr": (195, 12), "flistxattr": (196, 13), "setxattr": (188, 5), "lsetxattr": (189, 6),
        "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    },
    "memory of the process itself": {
        "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
        "madvise": (28, 233),
    },
    "processes and threads: to start, await and end its own": {
        "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "exit": (60, 93),
        "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95), "pidfd_open": (434, 434),
        "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "setpgid": (109, 154),
        "getpgid": (121, 155), "getpgrp": (111, None), "setsid": (112, 157), "getsid": (124, 156),
        "set_tid_address": (218, 96), "set_robust_list": (273, 99), "rseq": (334, 293), "futex": (202, 98),
        "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_setaffinity": (203, 122),
        "arch_prctl": (158, None), "prctl": (157, 167),
    },
    "signals: between its own processes": {
        "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_send_signal": (424, 424),
        "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
        "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
        "sigaltstack": (131, 132), "pause": (34, None), "restart_syscall": (219, 128),
    },
    "time: the clock, sleep, the three timers that a process has": {
        "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
        "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
        "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, None),
    },
    "facts: its user, its limits, its usage, the kernel's name; random bytes": {
        "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
        "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "getrlimit": (97, 163),
        "setrlimit": (160, 164), "prlimit64": (302, 261), "getrusage": (98, 165), "uname": (63, 160),
        "getrandom": (318, 278),
    },
}  # fmt: skip

NETWORK: Mapping[str, Numbers] = {"socket": (41, 198), "connect": (42, 203), "setsockopt": (54, 208)}
"""Calls of a session with a network of its own: it connects to the one socket there, and cannot listen."""

SUCCEEDS: Mapping[str, Numbers] = {
    # Files are in memory: there is nothing to write to a disk. On a file of the host, open for reading, fsync
    # would have the host's file system write its journal, at the expense of everything else on that disk.
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "msync": (26, 227),
}
"""Calls that return 0 and do nothing."""

ABSENT: Mapping[str, Numbers] = {
    # It passes its flags behind a pointer, which a filter cannot read; the C library then uses clone.
    "clone3": (435, 435),
    # timeout(1) then uses alarm.
    "timer_create": (222, 107),
}
"""Calls that fail as on a kernel without them (ENOSYS), since programs then have another way."""

NEWEST_CALL = 462
"""Later calls are unknown here, and fail as on a kernel without them."""

_F_GETFD_AND_DUPLICATES = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
_RECORD_LOCKS = (5, 6, 7)  # F_GETLK, F_SETLK, F_SETLKW: sqlite locks its files so
_F_SETFL, _F_GETPIPE_SZ = 4, 1032
_O_CLOEXEC_AND_NONBLOCK = 0x80000 | 0x800
# O_ASYNC has signals sent, O_DIRECT makes packets of what is written to a pipe. O_DIRECT is 0x4000 on x86_64
# and 0x10000 on aarch64.
_ASYNC_OR_DIRECT = 0x2000 | 0x4000 | 0x10000
_NEW_NAMESPACES, _CLONE_FILES, _CLONE_THREAD = 0x7E020080, 0x400, 0x10000
_CLOSE_RANGE_CLOEXEC = 0x4
_SIGNAL_OF_END, _SIGCHLD = 0xFF, 17
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
_MSG_OOB = 0x1
_AF_UNIX = 1
# Of a terminal: TCGETS, TCGETS2, TIOCGWINSZ, TIOCGPGRP. FIONREAD, FIONBIO; FIONCLEX, FIOCLEX.
_REQUESTS = (0x5401, 0x802C542A, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS
_OPTIONS = (3, 15, 16, 21, 23, 39)
_AF_INET, _SOCK_STREAM, _IPPROTO_TCP = 2, 1, 6
# SO_REUSEADDR, SO_KEEPALIVE, SO_LINGER, SO_RCVTIMEO, SO_SNDTIMEO; no SO_SNDBUF and SO_RCVBUF.
_SOCKET_OPTIONS = (2, 9, 13, 20, 21)
# TCP_NODELAY, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT, TCP_USER_TIMEOUT
_TCP_OPTIONS = (1, 4, 5, 6, 18)
_ITSELF = ((ArgumentCheck(0, (0,)),),)

CONDITIONS: Mapping[str, Alternatives] = {
    # No F_SETLEASE, F_NOTIFY, F_SETOWN, F_SETSIG, F_SETPIPE_SZ, F_OFD_SETLK.
    "fcntl": (
        (ArgumentCheck(1, (*_F_GETFD_AND_DUPLICATES, *_RECORD_LOCKS, _F_GETPIPE_SZ)),),
        (ArgumentCheck(1, (_F_SETFL,)), ArgumentCheck(2, (0,), _ASYNC_OR_DIRECT)),
    ),
    "ioctl": ((ArgumentCheck(1, _REQUESTS),),),
    "pipe2": ((ArgumentCheck(1, (0,), ~_O_CLOEXEC_AND_NONBLOCK & 0xFFFFFFFF),),),
    # No pairs of TIPC, which reach into the kernel's network.
    "socketpair": ((ArgumentCheck(0, (_AF_UNIX,)),),),
    "socket": (
        (
            ArgumentCheck(0, (_AF_INET,)),
            ArgumentCheck(1, (_SOCK_STREAM,), ~_O_CLOEXEC_AND_NONBLOCK & 0xFFFFFFFF),
            ArgumentCheck(2, (0, _IPPROTO_TCP)),
        ),
    ),
    "setsockopt": (
        (ArgumentCheck(1, (1,)), ArgumentCheck(2, _SOCKET_OPTIONS)),
        (ArgumentCheck(1, (_IPPROTO_TCP,)), ArgumentCheck(2, _TCP_OPTIONS)),
    ),
    "sendto": ((ArgumentCheck(3, (0,), _MSG_OOB),),),
    "recvfrom": ((ArgumentCheck(3, (0,), _MSG_OOB),),),
    # Shared memory is not counted in any process, unless it is backed by files, which are bounded.
    "mmap": (
        (
            ArgumentCheck(3, (0, _MAP_SHARED, _MAP_ANONYMOUS), _MAP_SHARED | _MAP_ANONYMOUS),
            ArgumentCheck(3, (0,), _MAP_HUGETLB),
        ),
    ),
    # Any other signal for the end of a child could be the one that continues its stopped parent. A thread
    # with descriptors of its own would hide pipes from the supervisor.
    "clone": (
        (
            ArgumentCheck(0, (0,), _NEW_NAMESPACES),
            ArgumentCheck(0, (0, _SIGCHLD), _SIGNAL_OF_END),
            ArgumentCheck(0, (0, _CLONE_FILES, _CLONE_FILES | _CLONE_THREAD), _CLONE_FILES | _CLONE_THREAD),
        ),
    ),
    "close_range": ((ArgumentCheck(2, (0, _CLOSE_RANGE_CLOEXEC)),),),
    "prctl": ((ArgumentCheck(0, _OPTIONS),),),
    # The calling process, which is pid 0: they could also change limits and cores of other processes of the
    # same user, and unless the host is root the supervisor is one of these.
    "prlimit64": _ITSELF,
    "sched_setaffinity": _ITSELF,
}
"""What the arguments of an allowed call have to be; a call without an entry takes any."""
