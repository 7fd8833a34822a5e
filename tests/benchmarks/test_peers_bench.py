"""The benchmark of other packages: equal replies for all sides, exact counts, no leftover processes."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from agentrl.engine.chat.wire import read_reply
from agentrl.errors import UserError
from benchmarks.compare import interleaved
from benchmarks.peers.endpoint import Connection, Replies
from benchmarks.peers.everything import bench_peers
from benchmarks.peers.settings import AGENTRL, IN_PROCESS, SETTINGS, VERIFIERS, Load, PeerSettings
from benchmarks.peers.sides import Program, resident_bytes
from benchmarks.question import text_of

PATH = b"/v1/chat/completions"
PACKAGES = {"python": "3", "verifiers": "0.4.0", "mcp": "2", "openai": "2", "pydantic": "2"}
# A side that reports the figures of its last argument, and starts a process that would outlive it.
STUB = """
import json, subprocess, sys
large = "a = bytes(range(256)) * 400_000; print(flush=True); input()"
command = [sys.executable, "-I", "-S", "-c", large]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(json.dumps({"child": child.pid}), flush=True)
for _ in sys.stdin:
    print(sys.argv[1], flush=True)
sys.exit("it is over")
"""


def conversation(results: int, *, stream: bool = False) -> bytes:
    """A request after this number of tool results."""
    messages = [{"role": "user", "content": "?"}]
    for number in range(results):
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": text_of(40)})
    return json.dumps({"messages": messages, **({"stream": True} if stream else {})}).encode()


def body_of(response: bytes) -> bytes:
    head, _, body = response.partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    return body


def test_the_reply_follows_from_the_messages():
    replies = Replies(calls=2)
    turns = [read_reply(body_of(replies.respond(PATH, conversation(n)))) for n in range(4)]
    calls = [[(call.id, call.name, call.arguments) for call in turn.message.tool_calls] for turn in turns]
    look = ("look", {"where": "tower"})
    assert calls == [[("call_0", *look)], [("call_1", *look)], [], []]
    assert [turn.message.text for turn in turns] == ["", "", "silver", "silver"]
    assert [turn.reason for turn in turns] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert body_of(replies.respond(b"/health", b"")) == b"{}"


@pytest.mark.parametrize("results", [0, 1, 2])
def test_a_stream_holds_the_same_turn(results):
    replies = Replies(calls=2)
    complete = json.loads(body_of(replies.respond(PATH, conversation(results))))["choices"][0]
    lines = body_of(replies.respond(PATH, conversation(results, stream=True))).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    delta = {name: value for choice in choices for name, value in choice["delta"].items()}
    assert {"content": None, **delta} == complete["message"]
    assert [choice["finish_reason"] for choice in choices] == [None, complete["finish_reason"]]
    assert chunks[-1]["usage"]["completion_tokens"] == 16


def test_requests_that_arrive_in_pieces_are_answered_once_and_in_order():
    class Transport:
        written = b""

        def write(self, data):
            self.written += data

    connection, transport = Connection(lambda path, body: path + body), Transport()
    connection.connection_made(transport)
    stream = b"POST /a HTTP/1.1\r\nContent-Length: 4\r\n\r\nbodyGET /b HTTP/1.1\r\nhost: x\r\n\r\n"
    for index in range(len(stream)):
        connection.data_received(stream[index : index + 1])
    assert transport.written == b"/abody/b"


async def test_all_sides_run_in_turns_that_are_reversed_in_every_repeat():
    order = []

    async def run(side):
        order.append(side)
        return len(order)

    results = await interleaved({side: lambda side=side: run(side) for side in "ab"}, repeats=2)
    assert order == ["a", "b", "a", "b", "b", "a"]
    assert results == {"a": [3, 6], "b": [4, 5]}, "the first run of each is to warm up"


def stub(tmp_path: Path, reply: dict) -> Program:
    """A side that answers every round with `reply`."""
    command = [sys.executable, "-I", "-S", "-c", STUB]
    return Program("stub", command, reply, dict(os.environ), tmp_path / "log")


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] != "Z"
    return False


async def test_the_memory_of_all_processes_counts_and_none_is_left(tmp_path):
    reply = {"episodes": 3, "solved": 3, "turns": 12}
    async with stub(tmp_path, reply).started() as side:
        child = side.resolved["child"]
        first = await side.play(3, 4)
        second = await side.play(3, 4)
        assert first.episodes == 3
        assert second.wall_s > 0
        assert second.cpu_s >= 0
        # The child holds 102 MB of its own.
        assert second.peak_bytes > 100e6
        assert resident_bytes(child) > 100e6
    assert not is_alive(child)


@pytest.mark.parametrize(
    "reply",
    [
        {"episodes": 3, "solved": 2, "turns": 12},
        {"episodes": 2, "solved": 2, "turns": 8},
        {"episodes": 3, "solved": 3, "turns": 11},
        {"episodes": 3, "solved": 3, "turns": 12, "error": "one failed and was played again"},
    ],
)
async def test_episodes_that_were_not_played_as_they_should_stop_the_benchmark(tmp_path, reply):
    async with stub(tmp_path, reply).started() as side:
        with pytest.raises(UserError, match=r"stub played .* in place of"):
            await side.play(3, 4)


async def test_a_side_that_ends_is_named_with_the_end_of_its_log(tmp_path):
    command = [sys.executable, "-I", "-S", "-c", "raise SystemExit('no module named x')"]
    program = Program("stub", command, {}, dict(os.environ), tmp_path / "log")
    with pytest.raises(UserError, match=r"stub ended, .*; its log ends with: no module named x"):
        async with program.started():
            pass


def small(**episodes: int) -> PeerSettings:
    """A load of two episodes at once."""
    return PeerSettings(loads={"tiny": Load(2, episodes, payload=50)}, repeats=2)


def test_this_package_alone_is_measured():
    result = bench_peers(None, settings=small(**{AGENTRL: 4, VERIFIERS: 4}), on_event=lambda message: None)
    assert json.loads(json.dumps(result)) == result
    (row,) = result["rows"]
    assert (list(row["sides"]), row["ratios"]) == ([AGENTRL], {})
    sides = row["sides"][AGENTRL]
    assert len(sides["episodes_per_s"]["repeats"]) == 2
    assert sides["turns_per_s"]["median"] == pytest.approx(4 * sides["episodes_per_s"]["median"])
    assert sides["cpu_ms_an_episode"]["median"] > 0
    assert 20 < sides["peak_mb"]["median"] < 1000
    resolved = result["settings"]["resolved"]["tiny, agentrl"]
    assert (resolved["n"], resolved["openai_concurrency"], resolved["env_kwargs"]) == (4, 2, {"payload": 50})


@pytest.mark.full
def test_verifiers_plays_the_same_episodes_where_its_interpreter_is_configured():
    configured = os.environ.get("AGENTRL_VERIFIERS_PYTHON")
    python = None if configured is None else Path(configured)
    settings = small(**{AGENTRL: 2, VERIFIERS: 2, IN_PROCESS: 2})
    result = bench_peers(python, settings=settings, on_event=lambda message: None)
    (row,) = result["rows"]
    others = [] if python is None else [VERIFIERS, IN_PROCESS]
    assert list(row["sides"]) == [AGENTRL, *others]
    assert list(row["ratios"]) == others
    for side in others:
        ratio = row["sides"][side]["cpu_ms_an_episode"]["median"]
        ratio /= row["sides"][AGENTRL]["cpu_ms_an_episode"]["median"]
        assert row["ratios"][side]["cpu"] == pytest.approx(ratio)
        resolved = result["settings"]["resolved"][f"tiny, {side}"]["config"]
        assert resolved["max_concurrent"] == 2
        assert resolved["env"]["taskset"]["serves_tools"] is (side == VERIFIERS)


def interpreter(folder: Path, versions: dict[str, str]) -> Path:
    """A fake interpreter that reports these versions of packages."""
    script = folder / "python"
    script.write_text(f"#!/bin/sh\necho '{json.dumps(versions)}'\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"python": "3"}, "does not run verifiers .it lacks verifiers, mcp.*name an interpreter"),
        ({**PACKAGES, "verifiers": "0.3.1"}, "runs verifiers 0.3.1; name an interpreter"),
        (PACKAGES, "starts its harness with uv; run .*python -m pip install uv"),
    ],
)
def test_an_interpreter_that_cannot_play_is_refused(tmp_path, monkeypatch, versions, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=message):
        bench_peers(interpreter(tmp_path, versions))


def test_an_unknown_load_is_refused():
    with pytest.raises(UserError, match=r"no load `fwe`; there are single, few, .* mean `few`"):
        bench_peers(Path("python"), only=["fwe"])


def test_the_loads_are_as_described():
    loads = SETTINGS.loads
    assert [load.concurrency for load in loads.values()] == [1, 16, 64, 256, 16]
    for load in loads.values():
        # No side has a round in which less than its concurrency plays.
        assert all(episodes % load.concurrency == 0 for episodes in load.episodes.values())
