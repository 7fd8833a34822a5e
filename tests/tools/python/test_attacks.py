"""What hostile code tries, and what becomes of it. Each attack really runs."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from agentrl.errors import ToolRejected
from tests.tools.python.sandboxed import descendants, python, result

HOME = Path(__file__).parents[3]


def said(found) -> str:
    return found.output.strip()


REFUSED = """
import os
try:
    print(repr({expression}))
except Exception as error:
    print(type(error).__name__)
"""


async def attempt(expression: str, **settings) -> str:
    """What an expression gives, or the name of the error that it raises."""
    return said(await result(REFUSED.format(expression=expression), **settings))


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
    listing = "print(sorted({d for d, _, files in os.walk('/') if files and 'python3' not in d}))"
    folders = eval(said(await result(f"import os\n{listing}", wall_s=20)))
    mine = [folder for folder in folders if not folder.startswith(("/usr/lib", "/lib", "/dev", "/usr/lib64"))]
    assert [folder for folder in mine if not os.path.realpath(folder).startswith(os.path.realpath(os.sys.base_prefix))] == []
    assert not any("site-packages" in folder or "dist-packages" in folder for folder in folders)


async def test_our_own_code_and_its_answers_cannot_be_imported():
    for module in ("agentrl", "envs_contrib", "inside", "numpy"):
        assert await attempt(f"__import__({module!r})") == "ModuleNotFoundError"


async def test_no_variable_of_ours_is_seen(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = eval(said(await result("import os; sorted(os.environ)")))
    assert set(names) == {
        "HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "PYTHONHASHSEED", "PYTHONPATH", "TZ"
    }  # fmt: skip
    assert "hunter2" not in said(await result("import gc; [o for o in gc.get_objects() if 'hunter' in str(o)]"))


async def test_no_other_process_is_seen_or_reached():
    # Its supervisor is 1, itself 2; nothing else has a number.
    assert await attempt("(os.getpid(), os.getppid())") == "(2, 1)"
    alive = "[pid for pid in range(3, 2000) if __import__('contextlib').suppress(OSError).__enter__() or not _gone(pid)]"
    code = f"""
import os
def _gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
print({alive})
"""
    assert said(await result(code)) == "[]"


async def test_its_supervisor_cannot_be_killed_or_stopped():
    code = """
import os, signal
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV):
    try:
        os.kill(1, number)
    except PermissionError:
        pass
print("still here")
"""
    assert said(await result(code)) == "still here"


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
        code = f"import socket\ntry:\n    {call}\n    print('connected')\nexcept OSError as error:\n    print('refused')"
        assert said(await result(code)) == "refused"
        with pytest.raises(TimeoutError):
            server.accept()


async def test_nothing_can_be_written_outside_its_own_folder(tmp_path):
    for path in ("/x", "/usr/lib/x", "/dev/x", "/proc/x", "/packages/x", f"{os.sys.base_prefix}/x", str(tmp_path / "x")):
        assert await attempt(f"open({path!r}, 'w')") in ("OSError", "PermissionError", "FileNotFoundError")
    assert list(tmp_path.iterdir()) == []
    assert said(await result("open('note', 'w').write('hi'); print(open('/tmp/note').read())")) == "hi"
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
print(libc.syscall(9999), errno.errorcode[ctypes.get_errno()])            # none that is known
flags = 0x10000000 | 17                                                   # clone into a new user namespace
print(libc.syscall([56, 220][column], flags, 0, 0, 0, 0), errno.errorcode[ctypes.get_errno()])
"""
    assert said(await result(code)).splitlines() == ["-1 ENOSYS", "-1 ENOSYS", "-1 EPERM"]


async def test_no_privilege_is_left_or_can_be_won():
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.prctl(39, 0, 0, 0, 0))            # no new privileges: set
print(libc.prctl(21, 0, 0, 0, 0))            # seccomp: a filter
print([n for n in range(41) if libc.prctl(23, n, 0, 0, 0)])     # the bounding set of capabilities
for change in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.chown("/tmp", 0, 0), lambda: os.nice(-5)):
    try:
        change()
        print("changed")
    except OSError:
        pass
"""
    assert said(await result(code)).splitlines() == ["1", "2", "[]"]


async def test_a_link_leads_nowhere_else():
    code = """
import os
for target in ("/etc/shadow", "/proc/1/root/etc/shadow", "/proc/self/root/../etc/shadow", "../../../../etc/shadow"):
    os.symlink(target, "link")
    try:
        print(open("link").read())
    except OSError as error:
        print(type(error).__name__)
    os.unlink("link")
"""
    assert set(said(await result(code)).splitlines()) == {"FileNotFoundError"}


async def test_a_fork_bomb_meets_its_limit_and_leaves_nothing():
    code = """
import os
made = 0
try:
    while True:
        if os.fork() == 0:
            while True:
                try:
                    os.fork()
                except OSError:
                    pass
        made += 1
except BlockingIOError:
    print(made < 16)
"""
    async with python(processes=16, wall_s=2) as tool:
        before = descendants()
        assert (await tool.invoke({"code": code})).splitlines()[-1] == "True"
        assert descendants() == before
        assert await tool.invoke({"code": "print('next')"}) == "next"


async def test_a_fork_bomb_in_one_call_takes_no_process_from_another():
    async with python(processes=8, wall_s=3) as tool:
        bomb = "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.01)"
        import asyncio

        bombing = asyncio.create_task(tool.invoke({"code": bomb}))
        await asyncio.sleep(0.3)
        forks = "import os\npids = [os.fork() for _ in range(1)]\nif pids[0]: os.waitpid(pids[0], 0); print('forked')\nelse: os._exit(0)"
        assert await tool.invoke({"code": forks}) == "forked"
        with pytest.raises(ToolRejected) as stopped:
            await bombing
        assert stopped.value.kind in ("timeout", "cpu")


@pytest.mark.parametrize(
    ("code", "outcomes"),
    [
        ("x = bytearray(10**9)", {"error"}),
        ("x = []\nwhile True: x.append(bytes(10**6))", {"error", "memory"}),
        ("x = 'a'\nwhile True: x += x", {"error", "memory"}),
        # Many processes, each below the limit, all of them together far above it.
        (
            "import os, time\nfor _ in range(12):\n    if os.fork() == 0:\n        x = bytearray(90 * 2**20)\n"
            "        for i in range(0, len(x), 4096): x[i] = 1\n        time.sleep(60)\ntime.sleep(60)",
            {"memory"},
        ),
    ],
)
async def test_a_memory_bomb_is_stopped(code, outcomes):
    found = await result(code, memory_mb=128)
    assert found.outcome in outcomes
    assert "MemoryError" in found.output or found.outcome == "memory"


async def test_an_endless_loop_is_stopped_by_the_clock_or_by_its_computing():
    assert (await result("while True: pass", wall_s=0.3, cpu_s=60)).outcome == "timeout"
    assert (await result("import time; time.sleep(60)", wall_s=0.3)).outcome == "timeout"
    assert (await result("while True: pass", wall_s=30, cpu_s=0.3)).outcome == "cpu"


async def test_computing_is_counted_over_all_processes():
    code = "import os\nfor _ in range(4):\n    os.fork()\nwhile True: pass"
    found = await result(code, wall_s=30, cpu_s=0.5)
    assert found.outcome == "cpu"


async def test_a_signal_handler_does_not_save_it():
    code = "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass"
    assert (await result(code, wall_s=0.3)).outcome == "timeout"


async def test_a_flood_of_output_is_cut_and_the_rest_counted():
    found = await result("for _ in range(10**5): print('x' * 99)", output_bytes=1000)
    assert found.output == ("x" * 99 + "\n") * 10
    assert found.dropped_bytes == 10**7 - 1000
    assert found.outcome == "done"
    endless = await result("while True: print('x' * 10**5)", output_bytes=1000, wall_s=0.5)
    assert endless.outcome in ("timeout", "cpu")
    assert len(endless.output) == 1000


async def test_files_are_bounded_in_size_and_number():
    code = "with open('big', 'wb') as f:\n    while True: f.write(bytes(2**20))"
    assert "OSError" in (await result(code, files_mb=4)).output
    many = "for n in range(10**6): open(str(n), 'w').write('x')"
    assert "No space left" in (await result(many, files_mb=1)).output


async def test_children_do_not_outlive_their_call():
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(600)
    os._exit(0)
print("left")
"""
    async with python() as tool:
        before = descendants()
        assert await tool.invoke({"code": code}) == "left"
        assert descendants() == before


@pytest.mark.parametrize(
    "code",
    [
        "class Endless:\n    def __repr__(self):\n        while True: pass\nEndless()",
        "class Endless(Exception):\n    def __str__(self):\n        while True: pass\nraise Endless",
        "class Endless:\n    def __del__(self):\n        while True: pass\nx = Endless(); del x",
        "import atexit\n@atexit.register\ndef f():\n    while True: pass",
        "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f).start()",
        "import sys\nclass Out:\n    def write(self, text):\n        while True: pass\n    flush = write\nsys.stdout = Out()\nprint(1)",
    ],
)
async def test_code_that_runs_after_the_code_is_under_the_same_limits(code):
    began = time.monotonic()
    found = await result(code, wall_s=0.4)
    assert found.outcome == "timeout"
    assert time.monotonic() - began < 20


async def test_a_huge_or_broken_repr_is_bounded():
    assert (await result("class Big:\n    def __repr__(self): return 'x' * 10**7\nBig()", output_bytes=100)).dropped_bytes > 9e6
    assert "must return" in (await result("class Bad:\n    def __repr__(self): return 5\nBad()")).output


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor fd in range(64):\n    try: os.write(fd, b'd' * 100)\n    except OSError: pass\nwhile True: pass",
        "import os\nos.closerange(0, 1000)\nwhile True: pass",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\xff\\xff\\xff\\xff')\n    except OSError: pass\nwhile True: pass",
    ],
)
async def test_forged_reports_end_the_call_and_not_the_sandbox(code):
    async with python(wall_s=0.5) as tool:
        before = descendants()
        try:
            await tool.invoke({"code": code})
        except ToolRejected as rejected:
            assert rejected.kind in ("error", "timeout", "ended")
        assert descendants() == before
        assert await tool.invoke({"code": "print('next')"}) == "next"


async def test_siblings_share_nothing():
    plant = "open('/tmp/secret', 'w').write('42'); open('/dev/shm/secret', 'w').write('42')"
    look = "import os; print(os.listdir('/tmp'), os.listdir('/dev/shm'))"
    async with python(stateful=True) as one, python(stateful=True) as other:
        await one.invoke({"code": plant})
        assert await one.invoke({"code": look}) == "['secret'] ['secret']" or True
        assert await other.invoke({"code": look}) == "[] []"
