"""Episodes of a gateway that have not ended, each in a file as far as it is.

    open/NAME.jsonl     an entry of a journal, written anew after each reply; gone when the episode has ended

A killed process loses what it had not answered, and at most the last reply of each episode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from agentrl.records import Entry, Journal, Outcome
from agentrl.records.journal import entry_of, to_line
from agentrl.records.lines import from_line
from agentrl.runtime.files import write_bytes
from agentrl.runtime.ownership import read_file
from agentrl.types import Episode

SoFar: TypeAlias = Callable[[], Episode]
"""Makes an episode of what there is of it; called in another thread."""


class OpenEpisodes:
    """Their files in the folder of a journal, whose thread writes them: no reply waits for the disk.

    split: of their entries in the journal.
    """

    def __init__(self, folder: Path, journal: Journal, split: str) -> None:
        self._folder, self._journal, self._split = folder / "open", journal, split
        self._latest: dict[str, SoFar] = {}

    async def recover(self, ids: set[str]) -> None:
        """Hand the journal what a killed process has left. ids: in the journal; receives theirs.

        Raises:
            DiskError: the disk does not take an episode.
            RecordError, OSError: a file is none of these.
        """
        for path in sorted(self._folder.glob("*.jsonl")):
            row = from_line(read_file(path))
            entry = entry_of(row if isinstance(row, dict) else {}, path)
            if entry.episode.id not in ids:
                ids.add(entry.episode.id)
                await self.add(entry.episode)
            self.remove(entry.episode.id)

    async def add(self, episode: Episode) -> None:
        """Hand the journal an episode that has ended.

        Raises:
            DiskError: the disk does not take it.
        """
        await self._journal.write_eval(self._split, 0, [_entry(episode)])

    def keep(self, id: str, so_far: SoFar) -> None:
        """Write an episode in place of what was written of it before."""
        self._latest[id] = so_far
        self._journal.run(partial(self._write, id))

    def remove(self, id: str) -> None:
        """Remove its file, after what was handed to the journal is written."""
        self._journal.run(partial(self._path(id).unlink, missing_ok=True))

    def _write(self, id: str) -> None:
        # Where the disk is slow, only the last of several is left.
        if (so_far := self._latest.pop(id, None)) is not None:
            self._folder.mkdir(exist_ok=True)
            write_bytes(self._path(id), to_line(_entry(so_far())))

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.jsonl"


def _entry(episode: Episode) -> Entry:
    return Entry(episode, (), Outcome.EVALUATED)
