"""The folders of tasks: read within bounds, and without following a link.

NAME/task.toml          settings
NAME/instruction.md     what an agent is told
NAME/environment/       a Dockerfile, and what it copies
NAME/tests/             test.sh writes a reward to /logs/verifier/reward.txt, or to reward.json
NAME/solution/          solve.sh; may be missing
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import DataError, RecordError, UserError
from agentrl.runtime.ownership import check_own, open_file, read_file

MOST_TASKS = 10_000
MOST_FILES = 500
MOST_BYTES = 16 << 20
"""Of all files of a task together (bytes)."""
_MOST_TEXT_BYTES = 256 << 10
_MOST_DEPTH = 12
SETTINGS, INSTRUCTION = "task.toml", "instruction.md"


@dataclass(frozen=True)
class EnvironmentSettings:
    """`[environment]`, as far as it decides what can be played."""

    docker_image: str | None = None
    memory_mb: int = 2048
    gpus: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    mcp_servers: Sequence[object] = ()
    healthcheck: object = None
    os: str = "linux"
    tpu: object = None
    workdir: str | None = None


@dataclass(frozen=True)
class PhaseSettings:
    """`[agent]`, `[verifier]` and `[solution]`."""

    timeout_sec: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | int | None = None
    environment_mode: str = "shared"
    environment: object = None
    collect: Sequence[object] = ()


@dataclass(frozen=True)
class TaskSettings:
    """task.toml; keys that are not here change nothing."""

    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    agent: PhaseSettings = field(default_factory=PhaseSettings)
    verifier: PhaseSettings = field(default_factory=PhaseSettings)
    solution: PhaseSettings = field(default_factory=PhaseSettings)
    metadata: Mapping[str, object] = field(default_factory=dict)
    steps: Sequence[object] = ()


class TaskFile(NamedTuple):
    """Contents of a file, and whether it may be run."""

    data: bytes
    is_executable: bool = False

    @property
    def text(self) -> str:
        """As UTF-8; bytes that are not are replaced."""
        return self.data.decode("utf-8", "replace")


Files = Mapping[str, TaskFile]
"""By path below a folder of the task."""


@dataclass(frozen=True)
class TaskFolder:
    """A task as it lies on the disk."""

    name: str
    settings: TaskSettings
    instruction: str
    environment: Files
    tests: Files
    solution: Files


_SETTINGS = TypeAdapter(TaskSettings)


def folders_of(folder: str) -> Sequence[Path]:
    """The folders of the tasks in a folder, by name; or that folder itself, where it is a task.

    Raises:
        DataError: there is none, or more than `MOST_TASKS`; or the folder is not this user's own.
    """
    top = Path(folder).expanduser()
    if not top.is_dir():
        raise DataError(f"{folder} is no folder; name one that holds tasks, each with a {SETTINGS}.")
    try:
        check_own(top, remedy="copy the tasks, and name the copy")
        if (top / SETTINGS).is_file():
            return [top]
        found = [
            path for path in sorted(top.iterdir()) if not path.is_symlink() and (path / SETTINGS).is_file()
        ]
    except UserError as error:
        raise DataError(str(error)) from None
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from None
    if not found:
        raise DataError(f"{folder} holds no task: no folder in it has a {SETTINGS}.")
    if len(found) > MOST_TASKS:
        raise DataError(f"{folder} holds {len(found):,} tasks; at most {MOST_TASKS:,} are read.")
    return found


@lru_cache(maxsize=32)
def read_task(folder: Path) -> TaskFolder:
    """The task in a folder.

    Raises:
        DataError: a part is missing, wrong or too large, or a file is a link.
    """
    try:
        settings = _SETTINGS.validate_python(tomllib.loads(_text(folder / SETTINGS)))
        instruction = _text(folder / INSTRUCTION)
        parts = _Parts(folder)
        return TaskFolder(
            folder.name, settings, instruction.strip(), *map(parts.read, ("environment", "tests", "solution"))
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise DataError(f"{folder / SETTINGS}: {key}: {first['msg'].lower()}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{folder / SETTINGS} cannot be read: {error}.") from None
    except RecordError as error:
        raise DataError(f"{error}.") from None
    except OSError as error:
        raise DataError(f"{error.filename or folder} cannot be read: {error.strerror}.") from None


def _text(path: Path) -> str:
    return read_file(path, most=_MOST_TEXT_BYTES).decode()


class _Parts:
    """Reads the folders of a task, which have one bound together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files_left, self._bytes_left = MOST_FILES, MOST_BYTES

    def read(self, part: str) -> Files:
        """All files of a folder: path below it -> contents. None where there is no such folder."""
        top = self._folder / part
        if not os.path.lexists(top):
            return {}
        if top.is_symlink():
            raise RecordError(f"{top} is a link")
        return {os.path.relpath(path, top): self._file(path) for path in self._paths(top)}

    def _paths(self, top: Path) -> Iterator[Path]:
        for place, folders, files in os.walk(top):
            folders.sort()
            if len(Path(place).relative_to(top).parts) >= _MOST_DEPTH and folders:
                raise RecordError(f"{place} is deeper than {_MOST_DEPTH} folders")
            linked = [name for name in folders if os.path.islink(os.path.join(place, name))]
            if linked:
                raise RecordError(f"{os.path.join(place, linked[0])} is a link")
            yield from (Path(place, name) for name in sorted(files))

    def _file(self, path: Path) -> TaskFile:
        self._files_left -= 1
        if self._files_left < 0:
            raise RecordError(f"{self._folder} has more than {MOST_FILES} files")
        if not str(path).isprintable():
            raise RecordError(f"{self._folder} has a file with a name that cannot be printed")
        with open_file(path, below=self._folder) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(self._bytes_left + 1)
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise RecordError(f"{self._folder} has more than {MOST_BYTES:,} bytes")
        return TaskFile(data, bool(mode & stat.S_IXUSR))
