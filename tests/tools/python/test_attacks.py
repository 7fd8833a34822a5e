"""Attacks of hostile code, all of which fail. Each attack really runs."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl.errors import ToolRejected
from tests.tools.python.sandboxed import descendants, gone, python, result

HOME = Path(__file__).parents[3]


def output_of(result) -> str:
    return result.output.strip()


REFUSED = """
import os
try:
    print(repr({expression}))
except Exception as error:
    print(type(error).__name__)
"""


async def attempt(expression: str, **settings) -> str:
    """The value of an expression, or the name of the error that it raises."""
    return output_of(await result(REFUSED.format(expression=expression), **settings))


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/etc/passwd",
        "/root/.bashrc",
        "/home",
        "/proc/1/environ",
        "/proc/self/environ",
        "/proc/self/mem",
        "/sys/kernel",
        "/dev/kmsg",
        "/dev/mem",
        str(HOME / "pyproject.toml"),
        str(HOME / "agentrl"),
        "../" * 20 + "etc/shadow",
    ],
)
async def test_a_file_of_this_machine_is_not_there(path):
    assert await attempt(f"os.stat({path!r})") == "FileNotFoundError"


async def test_there_are_no_files_but_python_and_the_c_library():
    listing = "import json, os; print(json.dumps([d for d, _, files in os.walk('/') if files]))"
    folders = json.loads(output_of(await result(listing, wall_s=20, output_bytes=10**6)))
    allowed = (os.path.realpath(sys.base_prefix), "/usr/lib", "/dev")
    assert [folder for folder in folders if not folder.startswith(allowed)] == []
    assert [folder for folder in folders if "-packages" in folder] == []


async def test_our_own_code_and_its_answers_cannot_be_imported():
    for module in ("agentrl", "envs_contrib", "inside", "numpy"):
        assert await attempt(f"__import__({module!r})") == "ModuleNotFoundError"


async def test_no_variable_of_the_host_is_visible(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = output_of(await result("import os; print(*sorted(os.environ))"))
    ours = "HOME LANG OMP_NUM_THREADS OPENBLAS_NUM_THREADS PATH PYTHONDONTWRITEBYTECODE PYTHONHASHSEED"
    assert names == f"{ours} PYTHONPATH TZ"
    assert output_of(await result("import ctypes; ctypes.CDLL(None).getenv(b'SECRET_TOKEN')")) == "0"


async def test_no_other_process_is_visible_or_reachable():
    # The supervisor has pid 1, the code 2; there is no other.
    assert await attempt("(os.getpid(), os.getppid())") == "(2, 1)"
    code = """
import os
for pid in range(3, 5000):
    try:
        os.kill(pid, 0)
        print(pid)
    except ProcessLookupError:
        pass
print("nobody")
"""
    assert output_of(await result(code)) == "nobody"


HARM = """
import os, resource, signal
for number in range(1, 65):
    try:
        os.kill(1, number)
    except PermissionError:
        pass
for harm in (
    lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)),
    lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    lambda: os.setpriority(os.PRIO_USER, 0, 19),
    lambda: os.sched_setaffinity(1, {0}),
    lambda: os.setpgid(1, 1),
):
    try:
        harm()
        print("done")
    except OSError:
        pass
resource.prlimit(0, resource.RLIMIT_CPU), os.sched_setaffinity(0, os.sched_getaffinity(0))
print("still here")
"""


async def test_its_supervisor_cannot_be_killed_stopped_starved_or_limited():
    assert output_of(await result(HARM)) == "still here"


@pytest.mark.parametrize(
    "call",
    [
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.create_connection(('127.0.0.1', {port}))",
        "__import__('urllib.request').request.urlopen('http://127.0.0.1:{port}/')",
    ],
)
async def test_there_is_no_network(call):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        call = call.format(port=server.getsockname()[1])
        code = f"import socket\ntry:\n    {call}\nexcept OSError:\n    print('refused')"
        assert output_of(await result(code)) == "refused"
        with pytest.raises(TimeoutError):
            server.accept()


async def test_nothing_can_be_written_outside_its_own_folder(tmp_path):
    folders = ("", "/usr/lib", "/dev", "/proc", "/packages", sys.base_prefix, str(tmp_path))
    for path in (f"{folder}/x" for folder in folders):
        assert await attempt(f"open({path!r}, 'w')") in ("OSError", "PermissionError", "FileNotFoundError")
    assert list(tmp_path.iterdir()) == []
    assert output_of(await result("open('note', 'w').write('hi'); print(open('/tmp/note').read())")) == "hi"
    assert not Path("/tmp/note").exists()


SYSTEM_CALLS = {
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "process_vm_readv": (310, 270),
    "init_module": (175, 105),
    "bind": (49, 200),
    "connect": (42, 203),
    "accept4": (288, 242),
    "setsockopt": (54, 208),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "sync": (162, 81),
    "io_setup": (206, 0),
    "epoll_create1": (291, 20),
    "eventfd2": (290, 19),
    "sendmsg": (46, 211),
    "mlock": (149, 228),
    "mincore": (27, 232),
    "readahead": (187, 213),
    "sysinfo": (99, 179),
    "statfs": (137, 43),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "seccomp": (317, 277),
}


async def test_dangerous_system_calls_are_refused():
    code = f"""
import ctypes, errno, platform
libc = ctypes.CDLL(None, use_errno=True)
column = ["x86_64", "aarch64"].index(platform.machine())
for name, numbers in {SYSTEM_CALLS!r}.items():
    result = libc.syscall(numbers[column], 0, 0, 0, 0, 0, 0)
    if (result, ctypes.get_errno()) != (-1, errno.EPERM):
        print(name, result, ctypes.get_errno())
print(libc.syscall(435, 0, 0), errno.errorcode[ctypes.get_errno()])       # clone3
print(libc.syscall([222, 107][column], 0, 0, 0), errno.errorcode[ctypes.get_errno()])  # timer_create
print(libc.syscall(9999), errno.errorcode[ctypes.get_errno()])            # none that is known
flags = 0x10000000 | 17                                                   # clone into a new user namespace
print(libc.syscall([56, 220][column], flags, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
"""
    assert output_of(await result(code)).splitlines() == ["-1 ENOSYS"] * 3 + ["-1 EPERM"]


async def test_no_privilege_remains_or_can_be_gained():
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.prctl(39, 0, 0, 0, 0))            # no new privileges: set
print(libc.prctl(21, 0, 0, 0, 0))            # seccomp: a filter
print([n for n in range(41) if libc.prctl(23, n, 0, 0, 0)])     # the bounding set of capabilities
for change in ("setuid(0)", "setresuid(0, 0, 0)", "chown('/tmp', 0, 0)", "nice(-5)"):
    try:
        eval(f"os.{change}")
        print("changed")
    except OSError:
        pass
"""
    assert output_of(await result(code)).splitlines() == ["1", "2", "[]"]


async def test_a_link_leads_nowhere_else():
    code = """
import os
for target in ("/etc/shadow", "/proc/1/root/etc/shadow", "/proc/self/root/etc/shadow", "../../../etc/shadow"):
    os.symlink(target, "link")
    try:
        print(open("link").read())
    except OSError as error:
        print(type(error).__name__)
    os.unlink("link")
"""
    assert set(output_of(await result(code)).splitlines()) == {"FileNotFoundError"}


FORGED = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, {report!r})
    except OSError:
        pass
while True:
    pass
"""


@pytest.mark.parametrize(
    "code",
    [
        FORGED.format(report=b"d" * 100),
        FORGED.format(report=b"\xff" * 100),
        "import os\nos.closerange(0, 1000)\nwhile True: pass",
    ],
)
async def test_forged_reports_end_the_call_and_not_the_sandbox(code):
    async with python(wall_s=0.5) as tool:
        before = set(descendants())
        with suppress(ToolRejected):
            await tool.invoke({"code": code})
        assert await gone(before)
        assert await tool.invoke({"code": "print('next')"}) == "next"


async def test_siblings_share_nothing():
    plant = "open('/tmp/secret', 'w').write('42'); open('/dev/shm/secret', 'w').write('42')"
    look = "import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))"
    async with python(stateful=True) as first, python(stateful=True) as second:
        await first.invoke({"code": plant})
        assert await first.invoke({"code": look}) == "['secret'] ['secret']"
        assert await second.invoke({"code": look}) == "[] []"


BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)
"""


async def test_a_fork_bomb_in_one_call_takes_no_process_from_another():
    async with python(processes=8, wall_s=2) as tool:
        bombing = asyncio.create_task(tool.invoke({"code": BOMB}))
        await asyncio.sleep(0.3)
        assert await tool.invoke({"code": "import os\nif os.fork() == 0: os._exit(0)\nos.wait()[1]"}) == "0"
        with pytest.raises(ToolRejected) as stopped:
            await bombing
        assert stopped.value.kind in ("timeout", "cpu")
