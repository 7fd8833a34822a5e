"""The coding agent of the examples: its tools, its loop, a run of a tiny model, and any other server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import pytest_asyncio
import tomli_w

import agentrl
from agentrl import Message, ScriptedAgent, ToolCall, call, play, say
from agentrl.run.audit import audit
from agentrl.tools import release_shared
from envs_contrib.repositories.suite import repository_of
from examples.coding_agent import agent
from examples.coding_agent.env import CodingAgent
from tests.flow.runs import SHAPE, journal_of
from tests.house.source import ROOT

RUN = ROOT / "examples/coding_agent/run.toml"


@pytest_asyncio.fixture
async def _released():
    yield
    await release_shared()


def task_of(env: CodingAgent, program: str):
    return next(task for task in env.tasks("train") if task.metadata["program"] == program)


@pytest.mark.usefixtures("_released")
async def test_it_repairs_a_repository_with_its_own_tools():
    env = CodingAgent()
    task = task_of(env, "awk/joined")
    world = repository_of(task)
    broken, fixed = world.files[world.path].splitlines(), world.correct_text.splitlines()
    ((old, new),) = [pair for pair in zip(broken, fixed, strict=True) if pair[0] != pair[1]]
    two = Message(
        "assistant",
        "",
        tool_calls=(
            ToolCall("run", {"command": "sh run_tests.sh; git log --oneline | wc -l"}, id="1"),
            ToolCall("read", {"path": world.path, "first": 1, "last": 2}, id="2"),
        ),
    )

    def script():
        yield two
        yield call("edit", path=world.path, old=old, new=new)
        yield call("run", command="sh run_tests.sh")
        yield say("repaired")

    episode = await play(env, ScriptedAgent(script()), task)
    assert episode.failure is None, episode.failure
    assert episode.total_of() == 1.0
    seen = ["\n".join(message.text for message in turn.observation) for turn in episode.turns]
    assert "FAILED" in seen[1]
    assert f"   1 {broken[0]}" in seen[1]
    assert f"{world.path} is changed in line" in seen[2]
    assert "FAILED" not in seen[3]


@pytest.mark.usefixtures("_released")
async def test_an_agent_that_does_nothing_or_breaks_its_tools_earns_nothing():
    env = CodingAgent()
    task = task_of(env, "awk/joined")
    script = [call("fly", height=3), call("run"), call("edit", path="nothing", old="a", new="b"), say("no")]
    episode = await play(env, ScriptedAgent(iter(script)), task)
    assert episode.failure is None, episode.failure
    assert episode.total_of() == 0.0
    seen = [turn.observation[-1].text for turn in episode.turns[1:]]
    assert seen[0] == "There is no tool `fly`; there are read, write, edit, run."
    assert seen[1].startswith("The arguments do not fit `run`")
    assert "nothing cannot be read" in seen[2]


def called(name: str, **arguments: object) -> str:
    return agent.result_of(
        {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    )


def test_its_tools_read_write_edit_and_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent, "COMMAND_S", 0.5)
    assert called("write", path="a/b.txt", text="one\ntwo\ntwo\n") == "a/b.txt has 3 lines."
    assert called("read", path="a/b.txt", first=2) == "   2 two\n   3 two"
    assert called("edit", path="a/b.txt", old="two", new="x").startswith("`old` occurs 2 times")
    assert called("edit", path="a/b.txt", old="", new="x").startswith("`old` occurs 0 times")
    assert called("edit", path="a/b.txt", old="one\ntwo", new="three") == "a/b.txt is changed in line 1."
    assert (tmp_path / "a/b.txt").read_text() == "three\ntwo\n"
    assert called("run", command="cat a/b.txt; echo no >&2; exit 3") == "three\ntwo\nno\n[exit code 3]"
    assert called("run", command="sleep 5") == "It was stopped after 0.5 s."
    assert called("run", command="true") == "(no output)"
    assert called("read", path="none").startswith("none cannot be read")
    assert called("write", path="a", text="x").startswith("a cannot be written")
    assert called("run", command="a\0b").startswith("It does not start")
    long = called("run", command="seq 9999")
    assert len(long) < agent.MOST_CHARS + 60
    assert "characters are left out" in long
    assert agent.result_of(
        {"id": "1", "type": "function", "function": {"name": "run", "arguments": "{"}}
    ).startswith("The arguments do not fit")


class _Server(BaseHTTPRequestHandler):
    """Answers with a call, then with words; then there is no room."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = len(body["messages"])
        words = {"role": "assistant", "content": "done"}
        made = {
            "id": "c",
            "type": "function",
            "function": {"name": "run", "arguments": '{"command": "echo hi > x"}'},
        }
        message = {"role": "assistant", "content": None, "tool_calls": [made]} if asked == 2 else words
        status = 400 if "no room" in body["messages"][1]["content"] else 200
        data = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quietly."""


@pytest.mark.parametrize(("task", "said"), [("Make x.", "done\n"), ("There is no room.", "(no reply: 400 ")])
def test_it_works_with_any_server_and_without_agentrl(tmp_path, task, said):
    server = HTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "task.md").write_text(task)
    variables = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1",
        "OPENAI_API_KEY": "x",
    }
    command = [sys.executable, "-I", str(ROOT / "examples/coding_agent/agent.py"), "task.md"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    server.shutdown()
    assert done.stdout.startswith(said)
    assert (tmp_path / "x").exists() == (said == "done\n")


@pytest.mark.full
def test_a_tiny_model_plays_and_trains_by_the_run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = tomllib.loads(RUN.read_text())
    # What a card is for: the sections that are left are those of any machine.
    del settings["model"], settings["engine"], settings["trainer"]
    settings["rollout"].pop("dynamic_sampling_filter_path")
    (tmp_path / "run.toml").write_text(tomli_w.dumps(settings))
    small = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1, "eval_episodes": 2}
    small |= {"rollout_max_context_len": 3000, "max_turns": 4}
    result = agentrl.train("run.toml", **SHAPE, **small, inline=True, quiet=True)
    entries = list(journal_of(result.folder, "step_*"))
    assert len(entries) == 4
    for entry in entries:
        assert entry["episode"].get("failure") is None
        assert entry["verdicts"][0]["total"] == 0.0
        assert all(turn["action"] for one in entry["episode"]["trajectories"] for turn in one["turns"])
    assert audit(result.folder).problems == ()
