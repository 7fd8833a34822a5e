"""The attempts of a run, and what a restart undid.

    attempts.jsonl                    a line when an attempt begins, and one when it ends
    rolled_back/attempt_1/            what attempt 1 recorded after the checkpoint that attempt 2 went on from
      trajectories/step_000013.jsonl
      metrics.jsonl

So `trajectories/` and `metrics.jsonl` hold the lineage of the present weights alone. While a process works on
a run, it has locked `run.lock`: there is one at a time. Evaluations, benchmarks and new verdicts lock their
folders in the same way.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, cast

from pydantic import Field, ValidationError

from agentrl.config import Section
from agentrl.errors import ConfigError, RecordError, RunBusyError
from agentrl.records import lines
from agentrl.records.diagnoses import DIAGNOSES
from agentrl.runtime.ownership import check_own, open_file, read_file
from agentrl.types import JSON

METRICS, JOURNAL, ATTEMPTS, ROLLED_BACK = "metrics.jsonl", "trajectories", "attempts.jsonl", "rolled_back"
LOCK = "run.lock"
Ending = Literal["finished", "interrupted", "terminated", "failed"]
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OWNER: Final = 0o600
_PID_BYTES: Final = 32
_LOCK_WAIT_S: Final = 0.1
"""A process that only reads whether a folder is locked holds the lock for microseconds."""


class Attempt(Section):
    """One process that worked on a run.

    resumed_from: the step that it went on from; None = it began anew. ended: None = it runs, or was killed.
    changes: settings that were changed for it, each as `old -> new`. command: of agentrl, whose run it is.
    """

    number: int
    pid: int
    began: datetime
    resumed_from: int | None = None
    ended: Ending | None = None
    changes: dict[str, str] = Field(default_factory=dict)
    command: str = "train"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the one process that writes into a folder.

    The kernel releases the lock when the process ends, however it does. A process that does not get the lock
    has written nothing.

    Raises:
        RunBusyError: another process has the lock.
        ConfigError: the folder cannot be made, or not be written; or see `check_own`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _locked_file(folder)
    except OSError as error:
        check_own(folder)
        raise ConfigError(
            f"{folder} cannot be made or written ({error.strerror}); choose another output_dir."
        ) from error
    try:
        check_own(folder)
        # On a full disk the lock goes without the number of its process.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def check_unlocked(folder: Path) -> None:
    """Check that no process writes into a folder, without writing there.

    Raises:
        RunBusyError: one does.
    """
    if is_locked(folder):
        raise _busy(folder)


def is_locked(folder: Path) -> bool:
    """Whether a process works on the run now. A folder that is read-only, or another user's, is read, too."""
    try:
        with open_file(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except PermissionError:
        return _is_in_list(folder / LOCK)
    except (OSError, RecordError):
        return False
    return False


def _is_in_list(path: Path) -> bool:
    """Whether the kernel lists a lock of a file that this user must not open."""
    try:
        facts = path.stat()
        lines = Path("/proc/locks").read_text("utf-8").splitlines()
    except OSError:
        return False
    file = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    return any({"FLOCK", file} <= set(line.split()) for line in lines)


def _locked_file(folder: Path) -> int:
    """The descriptor of the lock's file, locked."""
    path = folder / LOCK
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        # Whoever can open the file can hold its lock.
        descriptor = os.open(path, _LOCK_FLAGS, _OWNER)
        try:
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != _OWNER:
                with suppress(OSError):
                    os.fchmod(descriptor, _OWNER)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise _busy(folder) from None
        os.close(descriptor)
        time.sleep(_LOCK_WAIT_S / 10)


def _is_open_at(path: Path, descriptor: int) -> bool:
    """Whether a descriptor is that of the file at a path, which was not removed in between."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _busy(folder: Path) -> RunBusyError:
    return RunBusyError(
        f"another process works on {folder}{_owner(folder)}; wait for its end, stop it, or choose another "
        "name or output_dir."
    )


def attempts(folder: Path) -> list[Attempt]:
    """All attempts, in order; none of a run that never began.

    Raises:
        RecordError: the file is not as it was written.
    """
    found: dict[str, dict[str, JSON]] = {}
    path = folder / ATTEMPTS
    for facts in lines.read(path) if path.exists() else ():
        found.setdefault(str(facts.get("number")), {}).update(facts)
    try:
        return [Attempt.model_validate(facts) for facts in found.values()]
    except ValidationError:
        raise RecordError(f"{path} holds no attempts of this version") from None


def command_of(folder: Path) -> str:
    """The command of agentrl whose run is in a folder."""
    return next((attempt.command for attempt in attempts(folder)), "train")


def begin_attempt(
    folder: Path, *, resumed_from: int | None, changes: Mapping[str, str], command: str = "train"
) -> int:
    """Note that this process begins; returns the number of the attempt, from 1."""
    number = len(attempts(folder)) + 1
    attempt = Attempt(
        number=number,
        pid=os.getpid(),
        began=datetime.now(UTC),
        resumed_from=resumed_from,
        changes=dict(changes),
        command=command,
    )
    _note(folder, cast(dict[str, JSON], attempt.model_dump(mode="json", exclude_defaults=True)))
    return number


def end_attempt(folder: Path, number: int, ending: Ending) -> None:
    """Note how an attempt ended."""
    _note(folder, {"number": number, "ended": ending})


def record_sizes(folder: Path) -> dict[str, int]:
    """Size of every file that the run records into (bytes), by its path in the folder."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in _records(folder)}


def roll_back(folder: Path, kept: Mapping[str, int], *, attempt: int) -> None:
    """Move what was recorded beyond the sizes in `kept` to the folder of the attempt that recorded it.

    Call it before the next attempt begins. Killed and called again, it completes what it had begun:
    nothing is lost, and nothing is there twice.
    """
    undone = folder / ROLLED_BACK / f"attempt_{attempt}"
    for path in _records(folder):
        name = str(path.relative_to(folder))
        target = undone / name
        if name not in kept:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
        elif path.stat().st_size > kept[name]:
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_tail(path, kept[name], target)
            os.truncate(path, kept[name])


def _copy_tail(path: Path, size: int, target: Path) -> None:
    """Killed before the cut that follows, it makes the same copy again."""
    coming = target.with_name(f".{target.name}.coming")
    with open_file(path) as file, coming.open("wb") as copy:
        file.seek(size)
        shutil.copyfileobj(file, copy)
    os.replace(coming, target)


def _records(folder: Path) -> list[Path]:
    found = sorted((folder / JOURNAL).glob("*.jsonl*"))
    return [*found, *(path for name in (METRICS, DIAGNOSES) if (path := folder / name).exists())]


def _note(folder: Path, facts: Mapping[str, JSON]) -> None:
    lines.append(folder / ATTEMPTS, [lines.to_line(dict(facts))])


def _owner(folder: Path) -> str:
    try:
        pid = read_file(folder / LOCK, most=_PID_BYTES).decode().strip()
    except (OSError, ValueError):
        return ""
    return f" (process {pid})" if pid else ""
