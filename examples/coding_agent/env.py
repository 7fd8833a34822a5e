"""The agent of this folder as an environment: it repairs repositories of the suite in the sandbox."""

from collections.abc import Mapping
from pathlib import Path

from agentrl import Task
from envs_contrib.repositories import RepositoriesHarness

AGENT = (Path(__file__).parent / "agent.py").read_text(encoding="utf-8")


class CodingAgent(RepositoriesHarness):
    """A coding agent with tools of its own (read, write, edit, run) repairs small repositories."""

    program = "python3 .agent/agent.py .agent/task.md"

    def files(self, task: Task) -> Mapping[str, str]:
        """The repository, the task in words, and the agent."""
        return {**super().files(task), ".agent/agent.py": AGENT}
