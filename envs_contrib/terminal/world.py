"""What environments of a shell over a folder share: the machine of an episode, and its one tool."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping

from agentrl import Message, Task, ToolEnv, tool
from agentrl.tools import JSON, Shell

CONCURRENT_COMMANDS = 2 * (os.cpu_count() or 1)


class ShellEnv(ToolEnv):
    """A shell over a folder. A subclass says which, and what what is left of it is worth."""

    group = "code"
    needs = ("sandbox",)

    def __init__(self) -> None:
        super().__init__()
        self._shell: Shell | None = None

    @tool(max_concurrency=CONCURRENT_COMMANDS)
    async def shell(self, command: str) -> str:
        """Run a command in the folder of the repository and return what it prints.

        Args:
            command: a command of a shell, or several lines
        """
        if self._shell is None:
            return "There is no machine yet."
        return await self._shell.run(command)

    tools = (shell,)

    @abstractmethod
    def machine(self, task: Task) -> Shell:
        """The shell of an episode, with the files of its task."""

    @abstractmethod
    async def worth(self, task: Task, shell: Shell) -> float:
        """The reward of what an agent has left in the folder."""

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Begin with the files of the task; the machine starts with the first command."""
        self._shell = self.machine(task)
        return await super().reset(task, seed=seed)

    async def reward(self, task: Task, answer: str) -> float:
        """The worth of what is left, whatever the agent says of it."""
        del answer
        return 0.0 if self._shell is None else await self.worth(task, self._shell)

    async def close(self) -> None:
        """End the shell and delete its files."""
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.close()
        await super().close()
