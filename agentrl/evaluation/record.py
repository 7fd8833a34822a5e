"""The record of an evaluation: each episode in the journal as soon as it has ended, none played twice."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from agentrl.envs import Reward, Scorer
from agentrl.envs.scoring import Marked
from agentrl.errors import ConfigError
from agentrl.records import Entry, Journal, Outcome, read_journal
from agentrl.records.history import JOURNAL
from agentrl.records.journal import SUFFIX
from agentrl.records.writer import eval_name
from agentrl.runtime.files import write_text
from agentrl.runtime.ownership import read_file

Record: TypeAlias = Callable[[Marked], Awaitable[None]]
"""Adds an episode that has ended."""

_MAX_PENDING_BYTES: Final = 1 << 20
"""An interrupted evaluation writes what is pending before it ends: at most 256 episodes, in a fraction of a
second."""
_READ_AT_ONCE: Final = 64
_NOTE_EVERY_S: Final = 1.0
"""How often the time is written: an attempt that is killed loses that much of it."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """The journal of one set of prompts. folder: of the evaluation. name: of the set, for its file."""

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        """The file of the journal."""
        return self.folder / JOURNAL / f"{eval_name(self.name, 0)}{SUFFIX}"

    @property
    def _time_path(self) -> Path:
        return self.folder / f"{eval_name(self.name, 0)}.seconds"

    @property
    def seconds(self) -> float:
        """Wall time of all attempts so far (seconds).

        Raises:
            ConfigError: its file holds something else.
        """
        path = self._time_path
        try:
            return float(read_file(path).decode()) if path.exists() else 0.0
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); remove it, which loses that time.") from None

    async def entries(self, ids: Collection[str]) -> list[Entry]:
        """The recorded episodes that have one of these ids. Other tasks run while they are read.

        Raises:
            ConfigError: the journal is broken.
        """
        entries: list[Entry] = []
        try:
            for number, entry in enumerate(read_journal(self.path) if self.path.exists() else ()):
                if entry.episode.id in ids:
                    entries.append(entry)
                if number % _READ_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the journal of {self.folder} cannot be read ({error}); restore it, or remove that folder."
            ) from None
        return entries

    async def marked(self, ids: Collection[str], scorer: Scorer) -> dict[str, Marked]:
        """The recorded episodes that have one of these ids, by id, with the results of their own rewards.

        Raises:
            ConfigError: the journal is broken.
        """
        return {entry.episode.id: _marked(entry, scorer) for entry in await self.entries(ids)}

    @asynccontextmanager
    async def writing(self, scorer: Scorer) -> AsyncIterator[Record]:
        """Yields the function that adds an episode; all that it added is on disk when the block has ended.

        The time of the block is added to `seconds`, however it ends.

        Raises:
            DiskError: the disk did not take an episode.
            ConfigError: the time of earlier attempts cannot be read.
        """
        earlier, began, noted = self.seconds, time.perf_counter(), 0.0

        def note() -> None:
            nonlocal noted
            noted = time.perf_counter() - began
            # A full disk costs this file, not the evaluation.
            with suppress(OSError):
                write_text(self._time_path, f"{earlier + noted:.3f}\n")

        try:
            async with Journal(self.folder, max_pending_bytes=_MAX_PENDING_BYTES) as journal:

                async def add(marked: Marked) -> None:
                    await journal.write_eval(self.name, 0, [await _entry(marked, scorer)])
                    if time.perf_counter() - began > noted + _NOTE_EVERY_S:
                        note()

                yield add
        finally:
            note()

    async def replace(self, entries: Sequence[Entry]) -> None:
        """Replace the journal, whole or not at all.

        Raises:
            DiskError: the disk did not take the new one.
        """
        coming = self.folder / "coming"
        shutil.rmtree(coming, ignore_errors=True)
        async with Journal(coming) as journal:
            path = await journal.write_eval(self.name, 0, entries)
        if entries:
            path.replace(self.path)
        else:
            self.path.unlink(missing_ok=True)
        shutil.rmtree(coming)


def has_group_rewards(scorer: Scorer) -> bool:
    """Whether the score of an episode depends on its siblings."""
    return len(_own_rewards(scorer)) < len(scorer.rewards)


async def _entry(marked: Marked, scorer: Scorer) -> Entry:
    """The entry of an episode, with verdicts that rewards of groups are not yet part of."""
    own = replace(scorer, rewards=_own_rewards(scorer))
    verdicts = await own.judge([marked]) if marked.is_usable else []
    return Entry(marked.episode, tuple(verdicts), Outcome.EVALUATED)


def _marked(entry: Entry, scorer: Scorer) -> Marked:
    """The inverse of `_entry`: the results of the episode's own rewards."""
    names = [reward.name for reward in _own_rewards(scorer)]
    return Marked(entry.episode, {v.agent: {name: v.parts[name] for name in names} for v in entry.verdicts})


def _own_rewards(scorer: Scorer) -> tuple[Reward, ...]:
    return tuple(reward for reward in scorer.rewards if isinstance(reward, Reward))
