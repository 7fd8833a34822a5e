"""What the whole machine or the user has only so much of: code in the sandbox takes none of it.

Each attack really runs; and the filter's instructions are executed here, call by call, for each machine.
"""

from __future__ import annotations

import errno
import json
import struct

import pytest

from agentrl.tools.python.inside import seccomp, syscalls
from tests.tools.python.sandboxed import result

QUOTAS = {
    "a lease on a file of its own": "fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_WRLCK)",
    "a lease on the standard library": "fcntl.fcntl(library, fcntl.F_SETLEASE, fcntl.F_WRLCK)",
    "news of what is read": "fcntl.fcntl(folder, fcntl.F_NOTIFY, fcntl.DN_ACCESS)",
    "a lock of a file of the host": "fcntl.flock(library, fcntl.LOCK_EX)",
    "a lock that outlives its process": "fcntl.fcntl(own, 37, bytes(32))",
    "a signal of its choice": "fcntl.fcntl(1, 10, signal.SIGCONT)",
    "the receiver of signals": "fcntl.fcntl(1, fcntl.F_SETOWN, os.getpid())",
    "signals for what is read": "fcntl.fcntl(1, fcntl.F_SETFL, os.O_WRONLY | 0x2000)",
    "packets in its pipes": "fcntl.fcntl(1, fcntl.F_SETFL, os.O_WRONLY | os.O_DIRECT)",
    "packets in a pipe": "os.pipe2(os.O_DIRECT)",
    "a larger pipe": "fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 2**20)",
    "a FIFO": "os.mkfifo('fifo')",
    "watches of epoll": "select.epoll()",
    "a pair of TIPC": "socket.socketpair(30, socket.SOCK_STREAM)",
    "descriptors in flight": "socket.send_fds(pair[0], [b'x'], [own])",
    "data out of band": "pair[0].send(b'x', socket.MSG_OOB)",
    "a larger buffer": "pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10**9)",
    "huge pages": "mmap.mmap(-1, 2**21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
    "the space on the disk": "os.statvfs('/')",
    "the page cache": "os.posix_fadvise(library, 0, 0, os.POSIX_FADV_DONTNEED)",
    "requests to a device": "fcntl.ioctl(os.open('/dev/random', os.O_RDONLY), 0x80045200, bytes(4))",
}
ATTACK = f"""
import fcntl, json, mmap, os, select, signal, socket
own = os.open("own", os.O_RDWR | os.O_CREAT)
library, folder = os.open(os.__file__, os.O_RDONLY), os.open(os.path.dirname(os.__file__), os.O_RDONLY)
pair = socket.socketpair()
outcomes = {{}}
for name, attack in {QUOTAS!r}.items():
    try:
        outcomes[name] = repr(eval(attack))
    except OSError as error:
        outcomes[name] = type(error).__name__
print(json.dumps(outcomes))
"""


async def test_no_lease_watch_or_other_quota_of_the_machine_can_be_taken():
    assert json.loads((await result(ATTACK)).output) == dict.fromkeys(QUOTAS, "PermissionError")


NEEDED = """
import asyncio, fcntl, multiprocessing, os, shutil, sqlite3, subprocess, sys
async def slept(): await asyncio.sleep(0.01)
asyncio.run(slept())
with sqlite3.connect("base") as base: base.execute("create table t (x)")
with open("base", "rb") as file: os.fsync(file.fileno()); fcntl.lockf(file, fcntl.LOCK_SH)
shutil.copytree(".", "../tmp/copy"); shutil.copy2("base", "base2"); shutil.rmtree("copy")
with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, 2]))
print(asyncio.run(asyncio.create_subprocess_exec("true")) if os.path.exists("/usr/bin/true") else "")
print(subprocess.run([sys.executable, "-c", "import asyncio; asyncio.run(asyncio.sleep(0)); print(3)"],
                     capture_output=True, text=True))
import numpy, sympy
print(numpy.linalg.inv(2 * numpy.eye(2))[0, 0], sympy.solve("x**2 - 4"))
"""


@pytest.mark.full
async def test_python_numpy_and_sympy_need_no_other_call():
    report = await result(NEEDED, packages=("numpy", "sympy"), wall_s=60, cpu_s=60, memory_mb=512)
    assert report.output.splitlines()[0] == "[1, 2]", report.output
    assert "stdout='3\\n', stderr=''" in report.output
    assert report.output.splitlines()[-1] == "0.5 [-2, 2]"


def outcome(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """The outcome of a filter for a call, as seccomp(2) and the kernel's BPF machine define it."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    steps = list(struct.iter_unpack("HBBI", program))
    at = value = 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, operand)
            case 0x05:
                at += operand
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x35:
                at += if_true if value >= operand else if_false
            case 0x54:
                value &= operand
            case 0x06:
                return operand


ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


@pytest.mark.parametrize(
    ("machine", "column", "code"), [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)]
)
def test_the_filter_allows_what_is_listed_and_nothing_else(machine, column, code):
    filter = seccomp.program(machine)
    listed = {numbers[column]: name for calls in syscalls.ALLOWED.values() for name, numbers in calls.items()}
    conditional = {number for number, name in listed.items() if name in syscalls.CONDITIONS}
    succeed = {numbers[column] for numbers in syscalls.SUCCEEDS.values()}
    absent = {numbers[column] for numbers in syscalls.ABSENT.values()}
    for number in range(600):
        if number in conditional:
            continue
        expected = ALLOW if number in listed else EPERM if number <= syscalls.NEWEST_CALL else ENOSYS
        expected = 0x50000 if number in succeed else ENOSYS if number in absent else expected
        assert outcome(filter, code, number) == expected, (number, listed.get(number))
    assert outcome(filter, 0, 0) == KILL
    assert machine != "x86_64" or outcome(filter, code, 0x40000000) == KILL
    assert len(filter) // 8 < 400
    calls = {name: number for number, name in listed.items()}
    for arguments, expected in {
        (1, 4, 0x800): ALLOW,
        (1, 4, 0x2000): EPERM,
        (1, 1024, 1): EPERM,
        (1, 1026, 1): EPERM,
        (1, 6, 0x7F0000002000): ALLOW,
    }.items():
        assert outcome(filter, code, calls["fcntl"], arguments) == expected
    for flags, expected in {17: ALLOW, 0x3D0F00: ALLOW, 18: EPERM, 0x10000000: EPERM, 0x10B00: EPERM}.items():
        assert outcome(filter, code, calls["clone"], (flags,)) == expected


BUFFERS = """
import os, socket, time
for _ in range(6):
    if os.fork() == 0:
        pairs = [socket.socketpair() for _ in range(50)]
        for pair in pairs:
            for end in pair:
                end.setblocking(False)
                try:
                    while True: end.send(bytes(4096))
                except BlockingIOError:
                    pass
        time.sleep(60)
time.sleep(60)
"""
# The first thread of a process has ended, so the kernel shows no memory under the number of the process.
# malloc reserves up to 64 MB of addresses for a thread, where they happen to be aligned; the rest is enough.
HEADLESS = """
import ctypes, os, platform, threading, time
def hog():
    time.sleep(0.5)
    x = bytearray(45 * 2**20)
    for i in range(0, len(x), 4096): x[i] = 1
    time.sleep(60)
for _ in range(4):
    if os.fork() == 0:
        threading.Thread(target=hog).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
time.sleep(60)
"""


async def test_the_kernels_memory_for_sockets_is_bounded():
    report = await result(BUFFERS, wall_s=20)
    assert (report.outcome, report.detail) == ("memory", "more than 256 pipes and sockets")


async def test_memory_of_a_process_whose_first_thread_has_ended_is_counted():
    assert (await result(HEADLESS, wall_s=20, memory_mb=128)).outcome == "memory"
