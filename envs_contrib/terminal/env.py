"""The environment: a shell over a repository, and the grader in a sandbox of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agentrl import Limits, Message, Script, Task, UserError, call, say
from agentrl.tools import JSON, PythonTool, Shell, ShellTool
from envs_contrib.terminal import inside
from envs_contrib.terminal.bugs import BUGS
from envs_contrib.terminal.repositories import Repository, repository
from envs_contrib.terminal.world import ShellEnv

NUM_VARIANTS: Mapping[str, int] = {"train": 8, "test": 8}
"""Repositories of each bug; the last bug of each module is in the test split, the others in the other one."""
_GRADER = Path(inside.__file__).read_text(encoding="utf-8")
_OUTCOMES = TypeAdapter(list[str])


class Terminal(ShellEnv):
    """Small Python packages to repair in a shell, graded by tests that the agent cannot see or change.

    The folder of the shell holds a package with one mistake, and tests that fail because of it. When the
    agent answers, in whatever words, the package's files are copied into a fresh sandbox, where its functions
    are called with the arguments of hidden tests; the results are compared outside. All must be right.

    seed: of the packages' names and of the hidden tests.
    """

    breakdown = "kind"
    limits = Limits(max_turns=12, max_tokens=16_384, reward_timeout_s=60.0)

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def tasks(self, split: str) -> Sequence[Task]:
        """The repositories of a split: train or test.

        Raises:
            UserError: no such split.
        """
        if split not in NUM_VARIANTS:
            raise UserError(f"Terminal has no split `{split}`; it has {', '.join(NUM_VARIANTS)}.")
        return _tasks(self.seed, split)

    def machine(self, task: Task) -> Shell:
        """A shell over the files of the repository."""
        return _sandbox().shell(_repository(task).files)

    async def worth(self, task: Task, shell: Shell) -> float:
        """1.0 where every hidden test passes on the files that the agent left."""
        world, left = _repository(task), await shell.files()
        if left == dict(world.files):
            return 0.0
        return float(await passes(world, left))

    def expert(self, task: Task) -> Script:
        """Runs the tests, reads the module, repairs it, and runs the tests again."""
        world = _repository(task)
        tests = "python3 -m unittest 2>&1 | grep -v '^Ran '"
        yield call("shell", command=f"cat README.md; {tests}")
        yield call("shell", command=f"cat {world.path}")
        yield call("shell", command=_repair(world))
        yield call("shell", command=tests)
        yield say("done")

    def corpus(self) -> Iterable[str]:
        """Prompts, and the files of the repositories."""
        for task in self.tasks("train"):
            yield task.prompt[0].text
            yield from _repository(task).files.values()


async def passes(world: Repository, files: Mapping[str, str]) -> bool:
    """Whether the package among these files has the right outcome in every hidden test.

    Raises:
        ToolError: the sandbox died.
    """
    package = {path: text for path, text in files.items() if _is_of(world.package, path)}
    cases = [(case.function, case.args) for case in world.cases]
    module = f"{world.package}.{world.module}"
    result = await _sandbox_of_grader().run(f"{_GRADER}\ngrade({package!r}, {module!r}, {cases!r})")
    try:
        outcomes = _OUTCOMES.validate_json(result.output.strip().rpartition("\n")[2])
    except ValidationError:
        return False
    return outcomes == list(world.outcomes)


def _is_of(package: str, path: str) -> bool:
    return path.startswith(f"{package}/") and path.endswith(".py")


def _repair(world: Repository) -> str:
    """A command that undoes the bug."""
    return (
        "python3 - <<'END'\n"
        "from pathlib import Path\n"
        f"path = Path({world.path!r})\n"
        f"path.write_text({world.correct_text!r})\n"
        "END"
    )


@lru_cache(maxsize=1)
def _sandbox() -> ShellTool:
    """One for all episodes."""
    return ShellTool(name="shell")


@lru_cache(maxsize=1)
def _sandbox_of_grader() -> PythonTool:
    """The grader's, which has no programs; every run is a session of its own."""
    return PythonTool(name="grader", wall_s=10.0, cpu_s=5.0, memory_mb=256, output_bytes=200_000)


def _repository(task: Task) -> Repository:
    metadata = task.metadata
    number = metadata.get("bug")
    module, seed = str(metadata.get("module")), str(metadata.get("seed"))
    return repository(module, number if isinstance(number, int) else 0, seed)


@lru_cache(maxsize=16)
def _tasks(seed: int, split: str) -> tuple[Task, ...]:
    places = [
        (module, number)
        for module, bugs in BUGS.items()
        for number in range(len(bugs))
        if (number == len(bugs) - 1) == (split == "test")
    ]
    # One of each first, so that the first tasks are of all kinds.
    return tuple(
        _task(f"{split}-{module}-{number}-{variant}", module, number, f"{seed} {split} {variant}", split)
        for variant in range(NUM_VARIANTS[split])
        for module, number in places
    )


def _task(id: str, module: str, number: int, seed: str, split: str) -> Task:
    world = repository(module, number, seed)
    prompt = (
        f"The folder of your shell holds the Python package `{world.package}`, whose tests fail: run them "
        "with `python3 -m unittest`. Find the mistake in the package and repair it, so that every function "
        "does what its documentation promises; other tests will check it. Then answer with the word done."
    )
    metadata: dict[str, JSON] = {"module": module, "bug": number, "seed": seed, "kind": world.bug.kind}
    return Task(id, (Message("user", prompt),), None, metadata, split)
