"""The environment: a shell over a repository, and the grader in sandboxes of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentrl import Limits, Script, Task
from agentrl.tools import Shell
from envs_contrib.repositories.grading import passes
from envs_contrib.repositories.programs import LANGUAGES
from envs_contrib.repositories.suite import repairs, repository_of, shell_tool, tasks_of
from envs_contrib.terminal.world import ShellEnv


class Repositories(ShellEnv):
    """Programs in Python, shell, awk and Perl to repair, each with a history, graded by hidden tests.

    The folder of the shell is a repository of git with one mistake, and tests of which one or more fail. When
    the agent answers, in whatever words, its files are copied into a fresh sandbox, where the program is
    called as hidden tests say; a sandbox apart has the correct program, which is called likewise. All results
    must be equal.

    seed: of the names in the repositories, of their histories and of the hidden tests.
    languages: python, shell, awk, perl, or some of them.
    """

    breakdown = "language"
    limits = Limits(max_turns=16, max_tokens=16_384, reward_timeout_s=90.0)

    def __init__(self, seed: int = 0, languages: Sequence[str] = tuple(LANGUAGES)) -> None:
        super().__init__()
        self.seed, self.languages = seed, tuple(languages)

    def tasks(self, split: str) -> Sequence[Task]:
        """The repositories of a split: train or test.

        Raises:
            UserError: no such split or language, or its interpreter is missing here.
        """
        return tasks_of(split, self.seed, self.languages)

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
