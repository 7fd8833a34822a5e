"""What is run on the machine of a task: commands of an agent, the oracle, and the tests as in Harbor."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping

from agentrl.envs.harbor.folder import TaskFolder
from agentrl.envs.harbor.recipe import ROOT, Recipe
from agentrl.tools.shell import Shell

_OWN = ".verifier"
_CHUNK_BYTES = 6000
_NOTHING = "#!/bin/sh\nexit 0\n"
# As uvx does: its packages are there, and the folder of the command is no part of the path of modules.
_RUN_TESTER = """#!/usr/bin/env python3
import os, sys
words, left = sys.argv[1:], []
while words:
    word = words.pop(0)
    if word.startswith("-") and word.strip("-") in ("p", "python", "w", "with", "from", "ctrf"):
        words.pop(0)
    elif word not in ("run", "python", "-m", "pytest") or left:
        left.append(word)
os.execv(sys.executable, [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *left])
"""
_PROGRAMS: Mapping[str, str] = {
    **dict.fromkeys(("apt", "apt-get", "curl", "pip", "pip3", "wget"), _NOTHING),
    **dict.fromkeys(("uvx", "uv", "pytest"), _RUN_TESTER),
}
"""What scripts start to install what is there already."""
_REWARD = "/logs/verifier/reward"
_CLEAN = f"rm -rf {ROOT}/tests {ROOT}/logs {ROOT}/{_OWN}; mkdir -p {ROOT}/logs/verifier"


def in_its_folder(command: str, recipe: Recipe) -> str:
    """A command with what comes before it: the variables of the task, and its folder."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in recipe.variables.items()]
    return "\n".join([*exports, f"cd {shlex.quote(recipe.workdir)} 2> /dev/null", command])


def oracle(task: TaskFolder) -> Iterator[str]:
    """The commands that put the solution in its place, and run it."""
    yield f"rm -rf {ROOT}/solution; mkdir -p {ROOT}/solution"
    for path, contents in task.solution.items():
        place = f"{ROOT}/solution/{path}"
        for start in range(0, max(len(contents.data), 1), _CHUNK_BYTES):
            yield _appended(place, contents.data[start : start + _CHUNK_BYTES])
    exports = "".join(f"export {n}={shlex.quote(v)}; " for n, v in task.settings.solution.env.items())
    yield f"chmod -R +x {ROOT}/solution; {exports}bash /solution/solve.sh"


def _appended(place: str, data: bytes) -> str:
    """A command that writes bytes at the end of a file."""
    return (
        "python3 - <<'END'\nimport os\n"
        f"os.makedirs(os.path.dirname({place!r}), exist_ok=True)\n"
        f"with open({place!r}, 'ab') as file:\n    file.write({data!r})\nEND"
    )


async def reward_of(shell: Shell, task: TaskFolder, recipe: Recipe) -> float | None:
    """The reward that the tests of a task write; None = they wrote none.

    Nothing of the agent's runs any more. What it has put in the place of tests, of their results and of
    programs of theirs is removed first.

    Raises:
        ToolError: the sandbox died.
    """
    await shell.executed(_CLEAN, {})
    programs: dict[str, str | bytes] = {f"{_OWN}/bin/{name}": text for name, text in _PROGRAMS.items()}
    programs[f"{_OWN}/home/.local/bin/env"] = ""
    tests: dict[str, str | bytes] = {f"tests/{path}": contents.data for path, contents in task.tests.items()}
    await shell.put({**tests, **programs})
    workdir = shlex.quote(recipe.workdir)
    command = (
        f"chmod -R +x {ROOT}/{_OWN}/bin {ROOT}/tests; export PATH={ROOT}/{_OWN}/bin:$PATH; "
        f"mkdir -p {workdir}; cd {workdir} && bash /tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"
    )
    ended = await shell.executed(command, _variables(task, recipe), task.settings.verifier.timeout_sec)
    if ended.timed_out:
        return None
    read = await shell.executed(f"cat {_REWARD}.txt 2> /dev/null || cat {_REWARD}.json", {})
    return _number(read.output)


def _variables(task: TaskFolder, recipe: Recipe) -> dict[str, str]:
    own = {"HOME": f"{ROOT}/{_OWN}/home", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**recipe.variables, **task.settings.verifier.env, **own}


def _number(text: str) -> float | None:
    """A number; or one of a table in JSON: `reward`, or the mean of all."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        values = [value["reward"]] if "reward" in value else list(value.values())
    else:
        values = [value]
    numbers = [float(one) for one in values if isinstance(one, int | float)]
    if not values or len(numbers) < len(values) or not all(map(math.isfinite, numbers)):
        return None
    return sum(numbers) / len(numbers)
