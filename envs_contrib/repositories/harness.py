"""The suite for agents with a loop and tools of their own, which run as a program in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from agentrl import Limits, Task
from agentrl.envs.gateway import HarnessEnv
from agentrl.tools import ShellTool
from envs_contrib.repositories.grading import passes
from envs_contrib.repositories.programs import LANGUAGES
from envs_contrib.repositories.suite import OfSuite, more_programs, repository_of

AGENT = ".agent"
"""A folder in that of the repository which no commit and no grader sees: what an agent brings along."""
TASK = f"{AGENT}/task.md"


class RepositoriesHarness(OfSuite, HarnessEnv):
    """The repositories of `Repositories-v0` for a program that has tools of its own.

        class Mine(RepositoriesHarness):
            program = "python3 .agent/agent.py"

            def files(self, task):
                return {**super().files(task), ".agent/agent.py": AGENT}

    It begins in the folder of the repository, and finds what it is to do in `.agent/task.md`. What it has
    left in the folder is graded, whatever it prints.

    seed, languages: as for `Repositories-v0`.
    """

    group = "code"
    needs = ("sandbox",)
    limits = Limits(
        max_turns=24, max_tokens=16_384, reset_timeout_s=None, step_timeout_s=None, reward_timeout_s=90.0
    )

    def __init__(self, seed: int = 0, languages: Sequence[str] = tuple(LANGUAGES)) -> None:
        super().__init__(seed, languages)
        if self.shell is None:
            self.shell = _shell(self.languages)

    def files(self, task: Task) -> Mapping[str, str]:
        """Those of the repository, and the task in words."""
        return {**repository_of(task).files, TASK: task.prompt[0].text}

    def prepare(self, task: Task) -> str:
        """Makes the history of the repository."""
        return repository_of(task).prepare

    async def grade(self, task: Task, answer: str, files: Mapping[str, str]) -> float:
        """1.0 where every hidden test passes on the files that the program left."""
        del answer
        world = repository_of(task)
        is_changed = any(files.get(path) != text for path, text in world.files.items())
        return float(is_changed and await passes(world, files))


@lru_cache(maxsize=8)
def _shell(languages: tuple[str, ...]) -> ShellTool:
    return ShellTool(
        more_programs=more_programs(languages),
        timeout_s=300.0,
        memory_mb=1024,
        processes=64,
        max_concurrency=64,
    )
