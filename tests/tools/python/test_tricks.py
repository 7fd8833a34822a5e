"""Attacks of hostile code on its supervisor and on sibling sessions.

Whatever it does to its end of a pipe, a socket or a limit, the call ends, as a mistake of the model.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from agentrl.errors import ToolRejected
from agentrl.tools import release_shared
from agentrl.tools.python import PythonTool, namespaces
from agentrl.tools.python.inside import wire
from agentrl.tools.python.tool import MOST_OUTPUT_BYTES
from tests.tools.python.sandboxed import QUICK, descendants, gone, python, result

# The parent of the host may have ignored signals, also those that the C library reserves.
IGNORED_BY_THE_PARENT = """
import asyncio, ctypes, signal
from agentrl.tools import release_shared
from agentrl.tools.python import PythonTool
from agentrl.tools.python.inside import kernel
for number in (32, 33, 40, signal.SIGTERM):
    ignore = (1).to_bytes(8, "little") + bytes(24)
    assert ctypes.CDLL(None).syscall(kernel._RT_SIGACTION[kernel.MACHINE], int(number), ignore, None, 8) == 0
async def main():
    tool = PythonTool(sandbox="namespaces")
    for number in (signal.SIGKILL, signal.SIGSEGV, 32, 33, 40, signal.SIGTERM, signal.SIGRTMAX):
        print((await tool.run(f"import os; os.kill(os.getpid(), {int(number)})")).outcome)
    await release_shared()
asyncio.run(main())
"""


def test_every_signal_that_ends_the_interpreter_counts_as_the_models_mistake():
    assert ran(IGNORED_BY_THE_PARENT).split() == ["signal"] * 7


@asynccontextmanager
async def continued():
    """All processes of the sandbox run on after SIGSTOP: they are continued again and again, from outside."""
    pids = descendants()

    async def go_on() -> None:
        while True:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.002)

    continuing = asyncio.create_task(go_on())
    try:
        yield
    finally:
        continuing.cancel()


FLOOD = """
import os, threading, time
def flood(fd):
    while True:
        os.write(fd, b"d" * 4096)
for fd in (1, 4, 4, 4):
    threading.Thread(target=flood, args=(fd,), daemon=True).start()
time.sleep(0.1)
"""
COMPUTE = """
import os, threading
def compute():
    while True:
        pass
threading.Thread(target=compute, daemon=True).start()
os.write(1, b"x" * 60_000)
"""


async def test_a_flood_of_reports_does_not_block_the_supervisor():
    async with python(stateful=True, wall_s=1) as tool:
        await tool.invoke({"code": "1"})
        async with continued():
            for code in (FLOOD, "1", "2"):
                with suppress(ToolRejected):
                    await tool.invoke({"code": code})


PACKETS = """
import fcntl, os
for fd in (1, 4):
    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 2**20)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
for _ in range(200):
    os.write(4, b"e")
    os.write(1, b"x")
"""


async def test_code_cannot_make_packets_or_larger_pipes_of_its_reports():
    async with python(stateful=True) as tool:
        with pytest.raises(ToolRejected, match="PermissionError"):
            await tool.invoke({"code": PACKETS})
        for number in range(3):
            assert await tool.invoke({"code": f"{number}"}) == str(number)


async def test_a_cell_larger_than_a_pipe_arrives_complete():
    for filling in ("漢" * 19_000, "\x01" * 59_000):
        async with python(stateful=True) as tool:
            assert await tool.invoke({"code": f"#{filling}\nx = 41"}) == "(no output)"
            assert await tool.invoke({"code": f"#{filling}\nx + 1"}) == "42"


async def test_a_cell_that_is_never_read_times_out():
    async with python(stateful=True, wall_s=0.5) as tool:
        await tool.invoke({"code": "import os\nkept, (r, w) = os.dup(3), os.pipe()\nos.dup2(r, 3)"})
        with pytest.raises(ToolRejected) as rejected:
            await tool.invoke({"code": "\x01" * 59_000})
        assert rejected.value.kind == "timeout"
        assert await tool.invoke({"code": "1"}) == "1"


SHARED = """
import mmap
for make in (lambda: mmap.mmap(-1, 4096), lambda: open("/dev/zero", "r+b")):
    try:
        print(make())
    except OSError as error:
        print(type(error).__name__)
mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
with open("shared", "w+b") as file:
    file.truncate(4096)
    mmap.mmap(file.fileno(), 4096).close()
"""


async def test_memory_is_shared_only_through_files_which_are_bounded():
    assert (await result(SHARED)).output.split() == ["PermissionError", "FileNotFoundError"]


@pytest.mark.parametrize("harm", ["os.kill(0, 9)", "os.killpg(0, 19)", "os.kill(-1, 9)"])
async def test_a_signal_to_its_own_group_reaches_no_sibling(harm):
    tool = PythonTool(sandbox="namespaces", stateful=True, **{**QUICK, "wall_s": 1})
    async with tool.episode() as (first,), tool.episode() as (second,):
        await second.invoke({"code": "x = 1"})
        with suppress(ToolRejected):
            await first.invoke({"code": f"import os; {harm}"})
        assert await second.invoke({"code": "x + 1"}) == "2"
    await release_shared()


NAMES = """
import ctypes, socket
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for name in (lambda: one.bind(chr(0) + "meet"), lambda: one.connect(chr(0) + "meet"), lambda: one.listen(),
             lambda: one.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1),
             lambda: one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 10**9)):
    try:
        print(name())
    except PermissionError:
        print("refused")
"""


async def test_a_socket_gets_no_name_by_which_a_sibling_could_reach_it():
    assert (await result(NAMES)).output.split() == ["refused"] * 5


async def test_code_that_continues_between_calls_still_has_its_limits():
    async with python(stateful=True, cpu_s=0.2) as tool:
        await tool.invoke({"code": COMPUTE})
        several = len(descendants())
        async with continued():
            for _ in range(1000):
                if len(descendants()) < several:
                    break
                await asyncio.sleep(0.01)
        with pytest.raises(ToolRejected):
            await tool.invoke({"code": "1"})
        assert await tool.invoke({"code": "2"}) == "2"


async def test_who_is_out_of_memory_dies_first_and_leaves_no_core():
    async with python(stateful=True) as tool:
        limits = "import resource as r; r.getrlimit(r.RLIMIT_CORE)[0], r.getrlimit(r.RLIMIT_SIGPENDING)[0]"
        assert await tool.invoke({"code": limits}) == "(1, 256)"
        *others, interpreter = sorted(descendants())
        assert Path(f"/proc/{interpreter}/oom_score_adj").read_text() == "1000\n"
        assert "1000\n" not in {Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in others}


async def test_a_name_of_a_process_is_no_line_of_its_account():
    code = "import ctypes, time\nctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\ntime.sleep(0.2)\nprint(1)"
    for name in (b"RssAnon: x", b"\x0bRssAnon: x", b"\nRssAnon: x", b"x) R 1 (", b"\xff"):
        assert (await result(code.format(name=name))).output == "1\n", name


def test_the_longest_output_fits_into_an_answer():
    worst = len(json.dumps("\0" * 1000).encode()) / 1000
    assert worst * MOST_OUTPUT_BYTES < wire.MOST_BYTES


async def test_the_same_code_gives_the_same_answer_in_every_sandbox():
    code = "print(hash('word'), list({'a', 'b', 'c'}), __import__('random').random())"
    assert len({(await result(code)).output for _ in range(3)}) == 1


async def test_devices_can_be_used_and_not_changed():
    code = """
import os
os.write(os.open("/dev/null", os.O_RDWR), os.read(os.open("/dev/urandom", os.O_RDONLY), 8))
for name in os.listdir("/dev"):
    try:
        os.path.islink(f"/dev/{name}") or os.utime(f"/dev/{name}") or print(name)
    except OSError:
        pass
"""
    report = await result(code)
    assert (report.outcome, report.output) == ("done", "")


async def test_a_host_that_has_forked_still_ends_its_sandbox(monkeypatch):
    monkeypatch.setattr(namespaces, "_END_S", 60.0)
    async with PythonTool(sandbox="namespaces", **QUICK).episode():
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            async with asyncio.timeout(20):
                await release_shared()
            assert descendants() == {child}
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_no_handler_of_an_early_import_is_left_for_signals_from_inside(tmp_path):
    (tmp_path / "handling.py").write_text("import signal\nsignal.signal(signal.SIGUSR1, print)\n")
    code = f"""
import signal, sys
from agentrl.tools.python.inside import zygote
sys.path.append({str(tmp_path)!r})
zygote.preload(["handling"])
print(signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
"""
    assert ran(code) == "True"


# A user with all capabilities in a namespace of its own: its limits and mounts are invisible outside.
OWN_KERNEL = """
import asyncio, os, socket, sys, sysconfig
from pathlib import Path
from agentrl.errors import ToolError
from agentrl.tools.python import PythonTool, installation, namespaces
from agentrl.tools.python.inside import kernel
user = os.getuid()
kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
Path("/proc/self/setgroups").write_text("deny")
for name in ("uid_map", "gid_map"):
    Path(f"/proc/self/{name}").write_text(f"1000 {user} 1")
tool = PythonTool(sandbox="namespaces")
async def outcome():
    try:
        return (await tool.run("print(1)")).outcome
    except ToolError as error:
        return f"{error.kind} {error.detail}"
"""


def ran(code: str) -> str:
    """The output of a program in a subprocess."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_interpreter_that_cannot_be_confined_is_a_failure_of_the_world():
    code = """
Path("/proc/sys/user/max_user_namespaces").write_text("1")
print(asyncio.run(outcome()))
"""
    reply = ran(OWN_KERNEL + code)
    assert reply.startswith("unavailable")
    assert "unshare" in reply


def test_a_cancelled_caller_cancels_no_other_caller_where_no_session_can_start():
    code = """
Path("/proc/sys/user/max_pid_namespaces").write_text("1")
async def main():
    async with namespaces.started(installation.plan((), ())) as sandbox:
        ours, theirs = socket.socketpair()
        ours.close()
        socket.send_fds(sandbox._control, [b"s"], [theirs.fileno()])
        theirs.close()
        try:
            async with await sandbox.session(tool._limits(stateful=False)) as session:
                await session.run("1")
        except ToolError as error:
            print(error.kind)
asyncio.run(main())
"""
    assert ran(OWN_KERNEL + code) == "unavailable"


def test_a_mount_below_a_mounted_folder_is_read_only_too():
    code = """
place = f"{sysconfig.get_path('stdlib')}/pydoc_data"
kernel.mount("tmpfs", place, "tmpfs", 0, "mode=777")
Path(place, "a b").mkdir()
kernel.mount("tmpfs", f"{place}/a b", "tmpfs", 0, "mode=777")
write = "try: open({!r}, 'w')\\nexcept OSError as error: print(error.errno)"
for path in (f"{place}/x", f"{place}/a b/x"):
    print(asyncio.run(tool.run(write.format(path))).output, end="")
print(os.listdir(place), os.listdir(f"{place}/a b"))
"""
    assert ran(OWN_KERNEL + code).split("\n") == ["30", "30", "['a b'] []"]


async def test_no_process_remains_after_all_tricks():
    assert await gone(set())
