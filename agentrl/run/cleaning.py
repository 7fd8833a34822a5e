"""Removal of what a run no longer needs: superseded checkpoints, and runs that measured nothing.

The lineage (`trajectories/`, `metrics.jsonl`) and the final weights are removed only with the complete
folder, which has to be requested.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from agentrl.assembly.load import read_run
from agentrl.errors import UserError
from agentrl.records.history import JOURNAL, ROLLED_BACK, attempts, locked
from agentrl.run.checkpoints import Checkpoints
from agentrl.run.folder import RunFolder


class Scope(Enum):
    """How much of a run may be removed: what no resume needs, what restarts undid as well, or everything."""

    UNNEEDED = "unneeded"
    ROLLED_BACK = "rolled back"
    EVERYTHING = "everything"


class Removable(NamedTuple):
    """A folder that may be removed. num_bytes: of all files in it."""

    path: Path
    num_bytes: int
    reason: str


def clean(
    folder: Path, scope: Scope, *, dry_run: bool, on_event: Callable[[str], None] = lambda _: None
) -> list[Removable]:
    """Remove what `scope` allows from the folder of a run, and return it.

    Args:
        dry_run: only return it.
        on_event: gets a sentence for each checkpoint that is damaged.

    Raises:
        UserError: a process works on the run, or a folder cannot be removed.
        ConfigError: config.toml or a checkpoint is of another version of agentrl.
    """
    with locked(folder):
        reasons = _reasons(folder, scope, on_event)
        items = [Removable(path, _size_of(path), reason) for path, reason in reasons.items()]
        for item in [] if dry_run else items:
            try:
                shutil.rmtree(item.path)
            except OSError as error:
                raise UserError(
                    f"{item.path} cannot be removed ({error.strerror or error}); check who owns its files."
                ) from error
    return items


def _reasons(folder: Path, scope: Scope, on_event: Callable[[str], None]) -> dict[Path, str]:
    if scope is Scope.EVERYTHING:
        return {folder: "the complete run"}
    run = RunFolder(folder)
    if _measured_nothing(run):
        return {folder: "a run that ended before it measured anything"}
    best = read_run(folder).best_metric
    reasons = Checkpoints(run.checkpoints, keep=1, best=best, on_event=on_event).removable()
    undone = folder / ROLLED_BACK
    if scope is Scope.ROLLED_BACK and undone.exists():
        reasons[undone] = "records that a restart undid"
    return reasons


def _measured_nothing(run: RunFolder) -> bool:
    """Whether an attempt has ended without metrics, journal, checkpoint or weights."""
    records = (*(run.path / JOURNAL).glob("*"), *run.checkpoints.glob("step_*"))
    return not run.holds_run and not records and bool(attempts(run.path))


def _size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
