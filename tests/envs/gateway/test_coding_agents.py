"""Coding agents of the command line mend a file as they are: every token is trained where it was said."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl import ToolCall
from agentrl.algorithms.samples import samples_of
from tests.envs.gateway.test_recording import sampled_by, trained_in
from tests.envs.gateway.worlds import Showing, played_by, says
from tests.house.source import ROOT

pytestmark = pytest.mark.full
TASK = "Mend the function total in sum.py."
MENDS = "sed -i 's/a - b/a + b/' sum.py"
ENDS = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
PROVIDER = 'model_providers.run={{name="run",base_url="{url}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
OF_MINI = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}


@dataclass(frozen=True)
class CodingAgent:
    """A command with its flags, the tool that is its shell, and what it needs in its environment.

    ends: how the model ends a task: a turn of it, as a text or a command.
    """

    command: Sequence[str]
    shell: str
    argument: str = "command"
    more: dict[str, object] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    ends: str = ""


AGENTS = {
    "mini-swe-agent": CodingAgent(
        ("mini", "--model", "openai/policy", "--yolo", "--exit-immediately", "--task", TASK),
        "bash",
        variables={**OF_MINI, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        ends=ENDS,
    ),
    "claude-code": CodingAgent(
        ("claude", "--print", TASK, "--dangerously-skip-permissions", "--model", "policy"),
        "Bash",
        variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"},
    ),
    "codex": CodingAgent(
        (
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *("-c", 'model_provider="run"', "-c", PROVIDER, "-m", "policy", TASK),
        ),
        "exec_command",
        "cmd",
    ),
    "qwen-code": CodingAgent(
        ("qwen", "--prompt", TASK, "--yolo", "--auth-type", "openai", "--model", "policy"),
        "run_shell_command",
        more={"is_background": False},
    ),
}


def found(name: str) -> str:
    """The path of a command of these agents."""
    folders = (ROOT / ".venv-clients" / "bin", ROOT / ".npm-clients" / "node_modules" / ".bin")
    path = shutil.which(name, path=os.pathsep.join(map(str, folders)))
    assert path is not None, (
        "make .venv-clients/.installed .npm-clients/.installed installs these agents, three of them by npm"
    )
    return path


def program(agent: CodingAgent, folder: Path, said: list[str]):
    """The agent as a process, in a folder that is its home, too."""
    node = shutil.which("node") or ""

    async def run(url, key, task):
        home = {"HOME": str(folder), "PATH": os.pathsep.join(("/usr/bin", "/bin", str(Path(node).parent)))}
        of_openai = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        of_anthropic = {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        name, *arguments = (word.format(url=url) if word == PROVIDER else word for word in agent.command)
        process = await asyncio.create_subprocess_exec(
            found(name), *arguments, stdin=-3, stdout=-1, stderr=-2, cwd=folder,
            env={**home, **of_openai, **of_anthropic, **agent.variables},
        )  # fmt: skip
        try:
            said.append((await process.communicate())[0].decode())
        finally:
            if process.returncode is None:
                process.kill()
        return said[-1]

    return run


@pytest.mark.parametrize("name", AGENTS)
async def test_it_mends_a_file_and_is_recorded(name, tmp_path):
    agent, said, file = AGENTS[name], [], tmp_path / "sum.py"
    file.write_text("def total(a, b):\n    return a - b\n")
    runs = [ToolCall(agent.shell, {agent.argument: line, **agent.more}) for line in (MENDS, agent.ends)]
    policy = Showing(
        says("A wrong sign.", runs[0]), says("", runs[1]) if agent.ends else says("It adds now.")
    )
    episode = await played_by(
        program(agent, tmp_path, said), policy, timeout_s=150.0, limits={"max_tokens": 100_000}
    )
    assert episode.failure is None, (episode.failure, said)
    assert "return a + b" in file.read_text(), said
    assert len(policy.asked) == 2
    # Its second request goes on from the tokens of the first reply.
    assert [trajectory.reason for trajectory in episode.trajectories] == [None], episode.counts
    assert trained_in(samples_of(episode)) == sampled_by(policy)
