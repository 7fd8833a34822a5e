"""Groups that were played when a run stopped, in a file from which it goes on."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from agentrl.files import write_bytes
from agentrl.observe import lines
from agentrl.ownership import read_gzip
from agentrl.rollout.group import GroupInProgress, GroupOutcome

_MAX_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True, eq=False)
class SavedGroups:
    """Groups that no finished step was trained on, by the ordinal of their prompt.

    step: after which the run stopped; a run that resumes after another step has no use for them. ended,
    in_progress: groups with an outcome, and those that were stopped.
    """

    step: int
    ended: dict[int, GroupOutcome] = field(default_factory=dict)
    in_progress: dict[int, GroupInProgress] = field(default_factory=dict)

    @classmethod
    def of(
        cls, step: int, ended: Iterable[GroupOutcome], in_progress: Mapping[int, GroupInProgress]
    ) -> SavedGroups:
        """The groups of a run that stops after `step`."""
        return cls(step, {outcome.ordinal: outcome for outcome in ended}, dict(in_progress))

    def take(self, ordinal: int) -> tuple[GroupOutcome | None, GroupInProgress | None]:
        """The group of a prompt: its outcome, or as far as it was played; None, None = there is none."""
        return self.ended.pop(ordinal, None), self.in_progress.pop(ordinal, None)

    def write(self, path: Path) -> None:
        """Write them, whole or not at all; where there are none, no file is left.

        Raises:
            OSError: the disk does not take it.
        """
        if not (self.ended or self.in_progress):
            path.unlink(missing_ok=True)
            return
        line = lines.to_line(_adapter().dump_python(self, mode="json"))
        write_bytes(path, gzip.compress(line, compresslevel=3))

    @classmethod
    def read(cls, path: Path, *, step: int, on_event: Callable[[str], None]) -> SavedGroups:
        """The groups of a file, where they follow that step; otherwise none.

        on_event: called with a sentence where the file is damaged.
        """
        saved = cls(step)
        if path.exists():
            try:
                saved = _adapter().validate_python(lines.from_line(read_gzip(path, most=_MAX_BYTES)))
            except (OSError, ValueError):
                on_event(f"Warning: {path} is damaged: what was in flight is played again.")
        return saved if saved.step == step else cls(step)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[SavedGroups]:
    return TypeAdapter(SavedGroups)
