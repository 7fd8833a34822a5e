"""The environment: a shell over the environment of a task, graded by the task's own tests."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from agentrl.envs.base import Script
from agentrl.envs.harbor.folder import TaskFolder, folders_of, read_task
from agentrl.envs.harbor.packages import WHEELS, Sources, unpacked
from agentrl.envs.harbor.recipe import Recipe, recipe_of
from agentrl.envs.harbor.trial import in_its_folder, oracle, reward_of
from agentrl.envs.tool_env import ToolEnv
from agentrl.errors import DataError, UserError
from agentrl.tools.base import tool
from agentrl.tools.shell import Shell, ShellTool
from agentrl.types import JSON, Limits, Message, Task, call, say

_CONCURRENT = 2 * (os.cpu_count() or 1)
_MOST_SHOWN = 5


class Listed(NamedTuple):
    """A task of a folder. refused: what of it cannot be done without an image; empty = it can be played."""

    name: str
    refused: Sequence[str]


class _Machine(NamedTuple):
    """What one sandbox for all tasks of a folder shows."""

    tool: ShellTool
    paths: Mapping[str, str]


class HarborTasks(ToolEnv):
    """Tasks in Harbor's format, such as Terminal-Bench 2's, as far as they can be played without an image.

    folder: of the tasks, each a folder with task.toml, instruction.md, environment/, tests/ and solution/.
    mirror: a folder of wheels, from which packages come that this installation lacks.
    test_share: share of the tasks that are the test split, chosen by their names; 1 = all, for a benchmark.
    timeout_s: of a command, and of the tests; a task's own `verifier.timeout_sec` counts where it is shorter.
    memory_mb: of all processes of an episode together, at most; a task's own counts where it is less.

    Tasks that need an image are left out; `agentrl envs list FOLDER` says what it is that each of them needs.
    Their tests run on the machine that the agent has left, as in Harbor: see docs/tasks-in-other-formats.md.

    `counts` has no_reward, tests that wrote none; the reward is then 0.
    """

    group = "adapters"
    needs = ("sandbox",)
    limits = Limits(max_turns=40, max_tokens=32_768, step_timeout_s=None, reward_timeout_s=None)

    def __init__(
        self,
        folder: str,
        mirror: str | None = None,
        test_share: float = 0.2,
        timeout_s: float = 60.0,
        memory_mb: int = 2048,
    ) -> None:
        if not 0 <= test_share <= 1:
            raise UserError(f"HarborTasks: test_share is a share, from 0 to 1, got {test_share}.")
        super().__init__()
        self._source = folder, Sources(mirror)
        self._bounds = timeout_s, memory_mb
        self._test_share = test_share
        self._shell: Shell | None = None
        self._recipe = Recipe()

    @tool(max_concurrency=_CONCURRENT)
    async def shell(self, command: str) -> str:
        """Run a command in the folder of the task and return what it prints.

        Args:
            command: a command of a shell, or several lines
        """
        if self._shell is None:
            return "There is no machine yet."
        return await self._shell.run(in_its_folder(command, self._recipe))

    tools = (shell,)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split that can be played, by name.

        Raises:
            UserError: no such split.
            DataError: the folder cannot be read, or none of its tasks can be played.
        """
        if split not in self.splits:
            raise UserError(f"HarborTasks has no split `{split}`; it has {', '.join(self.splits)}.")
        playable = [name for name, refused in listed(*self._source) if not refused]
        chosen = [name for name in playable if _is_test(name, self._test_share) == (split == "test")]
        return [self._task(name, split) for name in chosen]

    def _task(self, name: str, split: str) -> Task:
        folder = self._folder(name)
        metadata: dict[str, JSON] = {"task": name}
        difficulty = folder.settings.metadata.get("difficulty")
        if isinstance(difficulty, str):
            metadata["difficulty"] = difficulty
        return Task(name, (Message("user", folder.instruction),), None, metadata, split)

    def _folder(self, name: str) -> TaskFolder:
        return read_task(_paths(self._source[0])[name])

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Begin with the environment of the task, which is made with the first command."""
        folder = self._folder(task.id)
        self._recipe = recipe = recipe_of(folder, self._source[1])
        machine = _machine(*self._source, *self._bounds)
        paths = [machine.paths[wheel.name] for wheel in sorted(recipe.found.wheels)]
        recipe.variables["PYTHONPATH"] = ":".join([*paths, "/packages"])
        self._shell = machine.tool.shell(dict(recipe.files), recipe.prepare)
        return await super().reset(task, seed=seed)

    async def reward(self, task: Task, answer: str) -> float:
        """The reward that the task's tests write, on the machine that the agent has left."""
        del answer
        if self._shell is None:
            return 0.0
        reward = await reward_of(self._shell, self._folder(task.id), self._recipe)
        if reward is None:
            self.counts["no_reward"] += 1
        return reward or 0.0

    async def close(self) -> None:
        """End the machine and delete its files."""
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.close()
        await super().close()

    def expert(self, task: Task) -> Script:
        """Puts the solution in its place and runs it, as Harbor's oracle does.

        Raises:
            UserError: the task has none.
        """
        folder = self._folder(task.id)
        if "solve.sh" not in folder.solution:
            raise UserError(
                f"the task {task.id} has no solution/solve.sh, so nothing can be shown to solve it."
            )
        for command in oracle(folder):
            yield call("shell", command=command)
        yield say("done")


@lru_cache(maxsize=8)
def listed(folder: str, sources: Sources) -> Sequence[Listed]:
    """All tasks of a folder, with what is in the way of each.

    Raises:
        DataError: the folder cannot be read, or none of its tasks can be played.
    """
    found = [_listed(path, sources) for path in _paths(folder).values()]
    refused = [task for task in found if task.refused]
    if len(refused) == len(found):
        shown = "; ".join(f"{name}: {why[0]}" for name, why in refused[:_MOST_SHOWN])
        raise DataError(f"{folder} has no task that can be played without an image: {shown}.")
    if refused:
        logging.getLogger(__name__).warning(
            "%s: %d of %d tasks need an image, and are left out; `agentrl envs list %s` says why",
            *(folder, len(refused), len(found), folder),
        )
    return found


def survey(folder: str, mirror: str | None = None) -> Sequence[Listed]:
    """All tasks of a folder, with what is in the way of each, also where none can be played.

    Raises:
        DataError: the folder or the mirror cannot be read.
    """
    return [_listed(path, Sources(mirror)) for path in folders_of(folder)]


def _listed(path: Path, sources: Sources) -> Listed:
    try:
        return Listed(path.name, tuple(recipe_of(read_task(path), sources).refused))
    except DataError as error:
        return Listed(path.name, (str(error).rstrip("."),))


@lru_cache(maxsize=8)
def _paths(folder: str) -> Mapping[str, Path]:
    return {path.name: path for path in folders_of(folder)}


def _is_test(name: str, share: float) -> bool:
    """By the name alone: another task moves none."""
    return int.from_bytes(sha256(name.encode()).digest()[:8]) < share * 2**64


@lru_cache(maxsize=8)
def _machine(folder: str, sources: Sources, timeout_s: float, memory_mb: int) -> _Machine:
    """One sandbox for all tasks of a folder: it shows what any of them needs."""
    tasks = [read_task(_paths(folder)[task.name]) for task in listed(folder, sources) if not task.refused]
    recipes = [recipe_of(task, sources) for task in tasks]
    wheels = sorted({wheel for recipe in recipes for wheel in recipe.found.wheels})
    paths = {wheel.name: f"{WHEELS}/{wheel.name.removesuffix('.whl')}" for wheel in wheels}
    shell = ShellTool(
        more_programs=sorted({program for recipe in recipes for program in recipe.programs}),
        packages=sorted({name for recipe in recipes for name in recipe.found.installed}),
        mounts=tuple((str(unpacked(wheel)), paths[wheel.name]) for wheel in wheels),
        places=sorted({place for recipe in recipes for place in recipe.places}),
        timeout_s=timeout_s,
        memory_mb=min(memory_mb, max(task.settings.environment.memory_mb for task in tasks)),
        files_mb=256,
        processes=64,
    )
    return _Machine(shell, paths)
