"""However the host, the sandbox or a call ends, no process remains, and the failure is the world's."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from agentrl import ScriptedAgent, call, play
from agentrl.errors import ToolError, ToolRejected
from agentrl.tools import release_shared
from agentrl.tools.python import PythonTool
from agentrl.tools.python.sessions import NOBODY
from agentrl.types import Ending
from tests.tools.python.sandboxed import QUICK, descendants, gone, inhabitants, namespaces, python
from tests.tools.python.test_python_tool import Numbers, solve

SLEEP = {"code": "import time; print('started'); time.sleep(60)"}


LEAVE_CHILDREN = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
"""


async def at_rest() -> set[int]:
    """The child processes, as soon as their number is stable."""
    samples: list[set[int]] = []
    while len(samples) < 5 or any(pids != samples[-1] for pids in samples[-5:]):
        samples.append(descendants())
        await asyncio.sleep(0.02)
    return samples[-1]


async def settled(number: int) -> set[int]:
    """Wait for a number of child processes; return them."""
    for _ in range(500):
        if len(pids := descendants()) >= number:
            return pids
        await asyncio.sleep(0.01)
    raise AssertionError(f"only {descendants()}")


@pytest.mark.parametrize("sandbox", ["namespaces", "none"])
@pytest.mark.parametrize("stateful", [False, True])
async def test_a_cancelled_call_leaves_no_process_and_the_next_works(sandbox, stateful):
    async with python(sandbox=sandbox, stateful=stateful) as tool:
        await tool.invoke({"code": "1"})
        idle = await at_rest()
        running = asyncio.create_task(tool.invoke(SLEEP))
        await settled(len(idle) + (0 if stateful else 2))
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        if not stateful:
            assert await gone(idle)
        assert await tool.invoke({"code": "2"}) == "2"
    assert await gone(set())


async def test_cancelling_at_any_moment_leaves_nothing():
    async with python() as tool:
        await tool.invoke({"code": "1"})
        idle = await at_rest()
        gc.collect()  # descriptors of earlier tests
        before = len(os.listdir("/proc/self/fd"))
        for steps in range(24):
            running = asyncio.create_task(tool.invoke({"code": "print(1)"}))
            for _ in range(steps):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running])
        assert await gone(idle)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert await tool.invoke({"code": "2"}) == "2"


async def test_every_namespace_is_its_own():
    async with python(stateful=True) as tool:
        await tool.invoke({"code": "1"})
        interpreter = sorted(await settled(4))[-1]
        for kind in ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup"):
            theirs, ours = (os.readlink(f"/proc/{pid}/ns/{kind}") for pid in (interpreter, "self"))
            assert theirs != ours, kind


async def test_code_never_runs_as_root():
    async with python(stateful=True) as tool:
        await tool.invoke({"code": "1"})
        interpreter = sorted(await settled(4))[-1]
        status = Path(f"/proc/{interpreter}/status").read_text().splitlines()
    ids = {int(number) for line in status if line.startswith("Uid:") for number in line.split()[1:]}
    assert ids == ({os.geteuid()} if os.geteuid() else {NOBODY})


async def test_two_episodes_of_one_sandbox_share_no_processes_files_or_users():
    tool = PythonTool(sandbox="namespaces", stateful=True, **QUICK)
    async with tool.episode() as (first,), tool.episode() as (second,):
        await first.invoke({"code": "1"})
        pid = sorted(await settled(4))[-1]
        await second.invoke({"code": "1"})
        other = sorted(await settled(6))[-1]
        for kind in ("user", "mnt", "pid"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/{other}/ns/{kind}"), kind
    await release_shared()


async def test_mounted_files_are_read_only():
    """Also where the permissions of the files allow their owner to write."""
    async with python(stateful=True) as tool:
        await tool.invoke({"code": "1"})
        interpreter = sorted(await settled(4))[-1]
        mounts = [line.split() for line in Path(f"/proc/{interpreter}/mounts").read_text().splitlines()]
    writable = {
        mount[1] for mount in mounts if "rw" in mount[3].split(",") and not mount[1].startswith("/dev/")
    }
    assert writable == {"/tmp"}
    assert all("nosuid" in mount[3] for mount in mounts if not mount[1].startswith("/dev/"))


def left(folder: Path) -> dict[str, object]:
    """The resources that the sandbox could leak."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(folder.rglob("*")),
        "mounts": Path("/proc/self/mounts").read_text(),
    }


@pytest.mark.parametrize("sandbox", ["namespaces", "none"])
async def test_releasing_shared_resources_leaves_no_process_file_or_mount(sandbox, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    while any(thread.name.startswith("asyncio-waitpid") for thread in threading.enumerate()):
        await asyncio.sleep(0.01)  # that of the previous test, about to end
    before = left(tmp_path)
    own = namespaces({os.getpid()})
    async with python(sandbox=sandbox, stateful=True) as tool:
        await tool.invoke({"code": "open('note', 'w').write('x')"})
        if sandbox == "namespaces":
            await tool.invoke({"code": LEAVE_CHILDREN})
        sandboxed = namespaces(descendants()) - own
        inside = inhabitants(sandboxed)
        assert bool(inside) == (sandbox == "namespaces")
        assert sandboxed or left(tmp_path)["files"] != before["files"]
    assert await gone(set())
    for _ in range(100):  # a thread ends a moment after its work
        if left(tmp_path) == before and not inside & inhabitants(sandboxed):
            break
        await asyncio.sleep(0.01)
    assert left(tmp_path) == before
    assert not inside & inhabitants(sandboxed)


@pytest.mark.parametrize("victim", ["the warm parent", "its keeper", "the session"])
async def test_a_killed_sandbox_fails_the_call_as_a_failure_of_the_world_and_the_next_call_works(
    victim,
):
    async with python(stateful=True) as tool:
        await tool.invoke({"code": "x = 1"})
        keeper, warm, session, *_ = sorted(await settled(4))
        running = asyncio.create_task(tool.invoke(SLEEP))
        await asyncio.sleep(0.2)
        assert not running.done()
        os.kill(
            {"its keeper": keeper, "the warm parent": warm, "the session": session}[victim], signal.SIGKILL
        )
        with pytest.raises(ToolError) as failed:
            await running
        assert failed.value.kind == "crashed"
        assert await tool.invoke({"code": "40 + 2"}) == "42"
    assert await gone(set())


async def test_an_episode_whose_sandbox_dies_has_failed_and_is_no_score():
    task = Numbers().tasks("train")[3]
    assert (await play(Numbers(), ScriptedAgent(solve(task)), task)).ending is Ending.COMPLETED

    def script():
        yield call("python", **SLEEP)

    playing = asyncio.create_task(play(Numbers(), ScriptedAgent(script()), task))
    await settled(4)
    await asyncio.sleep(0.1)
    os.kill(sorted(descendants())[1], signal.SIGKILL)
    episode = await playing
    assert episode.ending is Ending.FAILED
    assert (episode.failure.stage, episode.failure.kind) == ("tool", "crashed")
    assert episode.tools["python"].failed == {"crashed": 1}
    await release_shared()


PROGRAM = """
import asyncio, os, signal, sys
from agentrl.tools.python import PythonTool
from agentrl.tools.python.sessions import NOBODY

# A shell that runs the tests in the background ignores Ctrl-C, and so would this process.
signal.signal(signal.SIGINT, signal.default_int_handler)

async def main():
    async with PythonTool(stateful=True).episode() as (python,):
        await python.invoke({"code": sys.argv[1]})
        child = os.fork() if sys.argv[2] == "forks" else 0
        if child == 0 and sys.argv[2] == "forks":
            signal.pause()
        print(child, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("number", "forks"),
    [(signal.SIGKILL, "no"), (signal.SIGTERM, "no"), (signal.SIGINT, "no"), (signal.SIGKILL, "forks")],
)
async def test_when_its_host_is_killed_no_process_remains(number, forks):
    """Also where a child of the host lives on, which has all of its sockets."""
    command = [sys.executable, "-c", PROGRAM, LEAVE_CHILDREN, forks]
    child = 0
    host = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert host.stdout is not None
        child = int(host.stdout.readline())
        below = descendants() - {host.pid, child}
        assert len(below) >= 5
        host.send_signal(number)
        host.wait(10)
        for _ in range(300):
            if not any(map(_alive, below)):
                break
            await asyncio.sleep(0.01)
        assert [pid for pid in below if _alive(pid)] == []
        assert not child or _alive(child)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        host.kill()
        host.wait()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_loop_that_is_closed_in_a_thread_leaves_no_process():
    before = descendants()

    def call() -> None:
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(PythonTool(sandbox="namespaces", **QUICK).run("1")).output == "1\n"
        assert descendants() - before
        loop.close()

    await asyncio.to_thread(call)
    assert await gone(before)


async def test_many_callers_share_one_sandbox_and_come_and_go():
    tool = PythonTool(sandbox="namespaces", **QUICK)
    async with tool.episode() as (tool_of_episode,):
        await tool_of_episode.invoke({"code": "1"})
        idle = await at_rest()

        async def caller(n: int) -> str:
            async with tool.episode() as (mine,):
                if n % 5 == 0:
                    with pytest.raises(ToolRejected):
                        await mine.invoke({"code": "1 / 0"})
                return await mine.invoke({"code": f"print({n})"})

        assert await asyncio.gather(*map(caller, range(64))) == [str(n) for n in range(64)]
        assert await gone(idle)
    await release_shared()
    assert await gone(set())
