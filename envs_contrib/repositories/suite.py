"""The tasks of the suite, how one is repaired, and what a machine lacks for them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import lru_cache

from agentrl import Message, Script, Task, UserError, call, say
from agentrl.tools import JSON, ShellTool
from envs_contrib.repositories.history import has_git
from envs_contrib.repositories.programs import LANGUAGES, names, program
from envs_contrib.repositories.repository import RUN_TESTS, Repository, repository

NUM_VARIANTS: Mapping[str, int] = {"train": 4, "test": 4}
"""Repositories of each fault; the last fault of a program is in the test split, the others in the other."""


def checked_languages(languages: Sequence[str]) -> tuple[str, ...]:
    """The languages, each once.

    Raises:
        UserError: there is none, one is unknown, or its interpreter is missing here.
    """
    chosen = tuple(dict.fromkeys(languages))
    unknown = [name for name in chosen if name not in LANGUAGES]
    if unknown or not chosen:
        found = f"no language `{unknown[0]}`" if unknown else "no repository without a language"
        raise UserError(f"Repositories has {found}; it has {', '.join(LANGUAGES)}.")
    for name in chosen:
        interpreter = LANGUAGES[name][0]
        if name != "python" and shutil.which(interpreter, path="/usr/bin:/bin") is None:
            raise UserError(
                f"Repositories in {name} need `{interpreter}`, which /usr/bin and /bin do not have; install "
                f"it, or leave {name} out of `languages`."
            )
    return chosen


class OfSuite:
    """The settings and the tasks of the suite, for whichever environment comes next in the class."""

    breakdown: str | None = "language"

    def __init__(self, seed: int = 0, languages: Sequence[str] = tuple(LANGUAGES)) -> None:
        super().__init__()
        self.seed, self.languages = seed, tuple(languages)

    def tasks(self, split: str) -> Sequence[Task]:
        """The repositories of a split: train or test.

        Raises:
            UserError: no such split or language, or its interpreter is missing here.
        """
        if split not in NUM_VARIANTS:
            raise UserError(f"Repositories has no split `{split}`; it has {', '.join(NUM_VARIANTS)}.")
        return _tasks(split, self.seed, checked_languages(self.languages))


@lru_cache(maxsize=16)
def _tasks(split: str, seed: int, languages: tuple[str, ...]) -> tuple[Task, ...]:
    # One of each program first, so that the first tasks are of all kinds.
    places = [
        (number, name)
        for name in names()
        if name.partition("/")[0] in languages
        for number in range(len(program(name).faults))
        if (number == len(program(name).faults) - 1) == (split == "test")
    ]
    ordered = sorted(places, key=lambda place: place[0])
    return tuple(
        _task(name, number, f"{seed} {split} {variant}", split)
        for variant in range(NUM_VARIANTS[split])
        for number, name in ordered
    )


def _task(name: str, number: int, seed: str, split: str) -> Task:
    world = repository(name, number, seed)
    prompt = (
        f"The folder of your shell holds the repository `{world.name}`, a program in {world.language} whose "
        f"tests fail: run them with `sh {RUN_TESTS}`. Find the mistake in the program and repair it, so that "
        "it does what README.md promises; other tests will check it. Then answer with the word done."
    )
    metadata: dict[str, JSON] = {
        "program": name,
        "fault": number,
        "seed": seed,
        "language": world.language,
        "kind": world.fault.kind,
    }
    id = f"{split}-{name.replace('/', '-')}-{number}-{seed.rpartition(' ')[2]}"
    return Task(id, (Message("user", prompt),), None, metadata, split)


def repository_of(task: Task) -> Repository:
    """The repository of a task."""
    metadata = task.metadata
    number = metadata.get("fault")
    name, seed = str(metadata.get("program")), str(metadata.get("seed"))
    return repository(name, number if isinstance(number, int) else 0, seed)


def repairs(task: Task) -> Script:
    """Reads, runs the tests, repairs the program, and runs the tests again."""
    world = repository_of(task)
    tests = f"sh {RUN_TESTS}"
    look = "git log --oneline" if world.prepare else "cat HISTORY.md"
    yield call("shell", command=f"cat README.md; {look}; {tests}")
    yield call("shell", command=f"cat {world.path}")
    yield call("shell", command=repair(world))
    yield call("shell", command=tests)
    yield say("done")


def repair(world: Repository) -> str:
    """A command that undoes the fault."""
    end = "END OF THE FILE"
    return f"cat > {world.path} <<'{end}'\n{world.correct_text}{end}\n"


def more_programs(languages: Sequence[str]) -> tuple[str, ...]:
    """The programs of a shell besides the usual ones."""
    interpreters = [LANGUAGES[name][0] for name in languages if name != "python"]
    return (*interpreters, *(["git"] if has_git() else []))


@lru_cache(maxsize=8)
def shell_tool(languages: tuple[str, ...]) -> ShellTool:
    """One for all episodes."""
    return ShellTool(name="shell", more_programs=more_programs(languages))
