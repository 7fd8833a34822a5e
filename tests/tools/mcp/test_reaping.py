"""No process of a server remains after closing, after cancelling, or after a kill on either side."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest

from agentrl import call, say
from agentrl.envs.check.arena import Arena
from agentrl.envs.check.probes.cancel_probe import probe_cancelling
from agentrl.errors import ToolError
from agentrl.tools import release_shared
from agentrl.tools.mcp import McpTools, stdio
from tests.tools.mcp.watching import RAW, SDK, Desk, alive, ended, in_flight, opened, raw, servers, until

KINDS = ("plain", "apart", "stubborn")


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch):
    monkeypatch.setattr(stdio, "EXIT_S", 0.2)
    before = servers()
    yield
    assert servers() - before == set()


async def children_of(tools) -> list[int]:
    """The pids of a server and of children of every kind that it has started."""
    replies = [await tools["spawn"].invoke({"kind": kind}) for kind in KINDS]
    return sorted({int(pid) for reply in replies for pid in reply.split()})


@pytest.mark.parametrize("habits", [(), ("stays", "stubborn")])
async def test_closing_ends_the_server_and_all_it_started(habits):
    async with opened(raw(*habits)) as tools:
        pids = await children_of(tools)
        assert len(pids) == 4
        assert all(map(alive, pids))
    assert [pid for pid in pids if alive(pid)] == []


async def test_a_server_killed_in_mid_call_is_a_crash_and_leaves_no_child(tmp_path):
    async with opened(raw()) as tools:
        pids = await children_of(tools)
        calling, server = await in_flight(tools["hang"], tmp_path / "mark")
        assert server in pids
        os.kill(server, signal.SIGKILL)
        with pytest.raises(ToolError, match="the server ended during a call of `hang`") as caught:
            await ended(calling)
        assert caught.value.kind == "crashed"
        await until(lambda: not any(map(alive, pids)))


async def test_a_guard_killed_in_mid_call_takes_its_server_with_it(tmp_path):
    async with opened(raw()) as tools:
        reply = await tools["spawn"].invoke({"kind": "plain"})
        calling, server = await in_flight(tools["hang"], tmp_path / "mark")
        os.kill(os.getpgid(server), signal.SIGKILL)
        with pytest.raises(ToolError, match="ended during"):
            await ended(calling)
    assert [pid for pid in map(int, reply.split()) if alive(pid)] == []


OURS = """
import asyncio, signal, sys
from agentrl.tools.mcp import McpTools, stdio

stdio.EXIT_S = 0.2
# A shell that runs the tests in the background ignores Ctrl-C, and so would this process.
signal.signal(signal.SIGINT, signal.default_int_handler)

async def main():
    async with McpTools(command=sys.executable, args=sys.argv[1:]).episode() as tools:
        by_name = {tool.name: tool for tool in tools}
        for kind in ("plain", "apart", "stubborn"):
            print(await by_name["spawn"].invoke({"kind": kind}), flush=True)
        print("ready", flush=True)
        await by_name["hang"].invoke({"mark": "/dev/null"})

asyncio.run(main())
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
async def test_a_server_that_stays_dies_with_our_process(sign):
    ours = subprocess.Popen(
        [sys.executable, "-c", OURS, RAW, "stays", "stubborn"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    lines = list(iter(ours.stdout.readline, "ready\n"))
    pids = {int(pid) for line in lines for pid in line.split()}
    assert len(pids) == 4
    assert all(map(alive, pids))
    try:
        ours.send_signal(sign)
        ours.communicate(timeout=10)
    finally:
        ours.kill()
    await until(lambda: not any(map(alive, pids)))


async def test_a_server_dies_with_its_guard_when_this_process_is_killed():
    ours = subprocess.Popen(
        [sys.executable, "-c", OURS, RAW, "stays", "stubborn"], stdout=subprocess.PIPE, text=True
    )
    lines = list(iter(ours.stdout.readline, "ready\n"))
    server, *_ = {int(line.split()[0]) for line in lines}
    children = [int(line.split()[1]) for line in lines]
    try:
        ours.send_signal(signal.SIGSTOP)
        os.kill(os.getpgid(server), signal.SIGKILL)
        await until(lambda: not alive(server))
    finally:
        ours.kill()
        ours.communicate(timeout=10)
        for pid in filter(alive, children):  # their guard is dead
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("stateful", [True, False])
async def test_cancelled_at_any_await_it_leaves_nothing(stateful):
    toolkit = raw(stateful=stateful)

    def make():
        return Desk(toolkit)

    def policy(env, task, rng):
        yield call("remember", text="one")
        yield say("3")

    arena = Arena(make, make(), make().tasks("train"), seed=0)
    result = await probe_cancelling(arena, policy)
    await release_shared()
    assert result.findings == ()
    assert result.figures["cancels"] > 10


async def test_a_stateless_server_has_one_session_for_all_episodes():
    toolkit = raw(stateful=False)
    async with opened(toolkit) as first, opened(toolkit) as second:
        assert await first["remember"].invoke({"text": "a"}) == "a"
        assert await second["remember"].invoke({"text": "b"}) == "a b"
        pids = servers()
    async with opened(toolkit) as later:
        assert await later["remember"].invoke({"text": "c"}) == "a b c"
    assert servers() == pids
    await release_shared()
    assert servers() & pids == set()


async def test_a_shared_server_that_died_is_started_again_by_the_next_call(tmp_path):
    toolkit = raw(stateful=False)
    async with opened(toolkit) as tools:
        with pytest.raises(ToolError, match="ended during a call of `die`"):
            await tools["die"].invoke({"words": "ouch"})
        assert await tools["remember"].invoke({"text": "a"}) == "a"
        pid = int((await tools["spawn"].invoke({"kind": "plain"})).split()[0])
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(pid))
        # Dead between two calls: it had no state, so the model gets no note.
        await until(lambda: not servers())
        assert await tools["remember"].invoke({"text": "b"}) == "b"
    await release_shared()


def test_the_end_of_the_event_loop_ends_a_shared_server():
    toolkit = raw("stays", stateful=False)

    async def use():
        async with opened(toolkit) as tools:
            return await tools["remember"].invoke({"text": "a"})

    assert [asyncio.run(use()), asyncio.run(use())] == ["a", "a"]


async def test_no_word_is_lost_about_servers_that_come_and_go(caplog):
    for _ in range(20):
        async with opened(raw()) as tools:
            assert await tools["remember"].invoke({"text": "a"}) == "a"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_servers_of_the_sdk_end_by_themselves():
    async with opened(McpTools(command=sys.executable, args=[SDK])) as tools:
        assert await tools["add"].invoke({"a": 2, "b": 3}) == "5"
