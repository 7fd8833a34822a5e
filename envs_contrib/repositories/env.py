"""The environment: a shell over a repository, and the grader in sandboxes of its own."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl import Limits, Script, Task
from agentrl.tools import Shell
from envs_contrib.repositories.grading import passes
from envs_contrib.repositories.suite import OfSuite, repairs, repository_of, shell_tool
from envs_contrib.terminal.world import ShellEnv


class Repositories(OfSuite, ShellEnv):
    """Programs in Python, shell, awk and Perl to repair, each with a history, graded by hidden tests.

    The folder of the shell is a repository of git with one mistake, and tests of which one or more fail. When
    the agent answers, in whatever words, its files are copied into a fresh sandbox, where the program is
    called as hidden tests say; a sandbox apart has the correct program, which is called likewise. All results
    must be equal.

    seed: of the names in the repositories, of their histories and of the hidden tests.
    languages: python, shell, awk, perl, or some of them.
    """

    limits = Limits(max_turns=16, max_tokens=16_384, reward_timeout_s=90.0)

    def machine(self, task: Task) -> Shell:
        """A shell over the repository, whose history is made with the first command."""
        world = repository_of(task)
        return shell_tool(self.languages).shell(world.files, world.prepare)

    async def worth(self, task: Task, shell: Shell) -> float:
        """1.0 where every hidden test passes on the files that the agent left."""
        world, left = repository_of(task), await shell.files()
        if left == dict(world.files):
            return 0.0
        return float(await passes(world, left))

    def expert(self, task: Task) -> Script:
        """Reads, runs the tests, repairs the program, and runs the tests again."""
        return repairs(task)

    def corpus(self) -> Iterable[str]:
        """Prompts, and the files of the repositories."""
        for task in self.tasks("train"):
            yield task.prompt[0].text
            yield from repository_of(task).files.values()
