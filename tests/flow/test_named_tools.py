"""A run whose tools are named in its file: made once, offered to every episode, kept, and gone at the end."""

from __future__ import annotations

import sys

import pytest

import agentrl
from agentrl.assembly.load import load_config
from tests.flow.runs import TINY, WARM
from tests.tools.mcp.watching import RAW, servers

RUN_FILE = f"""
[env]
env = "tests.flow.test_named_tools:Asking"
tools = ["mcp", "calculator"]

[env.tool_kwargs.mcp]
command = "{sys.executable}"
args = ["{RAW}"]
only = ["remember"]
stateful = false
"""


class Asking(agentrl.ToolEnv):
    """A world without a tool of its own: its expert asks a server that counts who came."""

    limits = agentrl.Limits(max_turns=3, max_tokens=400)

    def tasks(self, split):
        return [agentrl.Task.ask(f"{split}{n}", f"ask {n}", "x") for n in range(8)]

    def reward(self, task, answer):
        return float(answer.startswith(task.answer))

    def expert(self, task):
        yield agentrl.say((yield agentrl.call("remember", text="x"))[:1])


@pytest.mark.full
def test_a_run_with_named_tools_trains_evaluates_and_leaves_nothing(tmp_path):
    before = servers()
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE)
    warm = {**WARM, "warm_start_steps": 2, "num_demonstrations": 16, "warm_start_batch_size": 8}
    small = {**TINY, **warm, "num_rollout": 1, "eval_episodes": 8}
    run = agentrl.train(run_file, quiet=True, output_dir=str(tmp_path), name="named", **small)
    assert servers() == before
    saved = load_config(run.folder / "config.toml", {})
    assert saved.env.tools == ("mcp", "calculator")
    assert saved.env == load_config(run_file, {}).env
    report = agentrl.evaluate(
        saved.env.env,
        str(run.folder / "checkpoint"),
        quiet=True,
        n=4,
        tools="mcp,calculator",
        tool_kwargs=saved.env.tool_kwargs,
    )
    assert report.n == 4
    assert not report.failures
    assert servers() == before
