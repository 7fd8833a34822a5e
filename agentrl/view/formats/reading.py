"""Trajectories of other tools as a journal: files that may come from anybody.

Lines and documents have a limit, every field is checked, and no path in them is followed. The journal is
there as a whole or not at all; a last line without its end, as of a file that is still written, is skipped
and counted.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from gzip import BadGzipFile, GzipFile
from io import BufferedIOBase
from pathlib import Path
from typing import Final, NamedTuple

from agentrl.errors import ConfigError, RecordError
from agentrl.records import Entry, lines, members
from agentrl.records.history import JOURNAL
from agentrl.records.journal import SUFFIX, to_line
from agentrl.records.writer import eval_name
from agentrl.runtime.files import write_bytes
from agentrl.runtime.ownership import open_file, read_file
from agentrl.types import JSON
from agentrl.view.formats import messages
from agentrl.view.formats.exporting import Bar, new_path
from agentrl.view.formats.from_atif import Imported, Trial, imported_of, number_of
from agentrl.view.formats.table import CONFIG, DOCUMENT, GZIP, LINES

MAX_BYTES: Final = 256 << 20
"""Of a line or a document: an episode (bytes)."""
_MOST_PENDING: Final = 64 << 20
_MEMBER: Final = 1 << 20
_FILE: Final = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,99}/){0,8}(?:step|eval_[A-Za-z0-9._-]{1,99})_\d{6,9}"
)
_HARBOR: Final = re.compile(r"trajectory(?:\.[\w.-]+)?\.json")
INCOMPLETE = "line without its end, the last one"
BARE = "turns have token ids without logprobs or prompt: without tokens"


class _Row(NamedTuple):
    """An object of a file, its place for sentences, and what the trial says that it is of."""

    value: dict[str, JSON]
    where: str
    trial: Trial | None = None


@dataclass(slots=True)
class ImportedJournal:
    """What was read. formats: episodes by format (count). notes: what was left out (count)."""

    formats: Counter[str] = field(default_factory=Counter)
    files: set[str] = field(default_factory=set)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def num_episodes(self) -> int:
        """All episodes (count)."""
        return self.formats.total()


def files_of(path: Path) -> list[Path]:
    """The files to read: a file of lines or one document; of a folder, all that are below it.

    Where some are named as by Harbor, whose folders of jobs hold other JSON, too, these alone.

    Raises:
        ConfigError: there are none.
    """
    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}; name trajectories of ATIF, or messages.")
    below = sorted(p for p in path.rglob("*") if _is_read(p)) if path.is_dir() else [path]
    found = [p for p in below if _HARBOR.fullmatch(p.name)] or below
    if not found or not all(map(_is_read, found)):
        raise ConfigError(
            f"{path} holds no {LINES}, {LINES}{GZIP} or {DOCUMENT} file; name one, or a folder."
        )
    return found


def _is_read(path: Path) -> bool:
    return path.name.endswith((LINES, f"{LINES}{GZIP}", DOCUMENT)) and path.is_file()


def import_files(paths: list[Path], out: Path, config: bytes | None, bar: Bar) -> ImportedJournal:
    """Write a new run's folder with the episodes of some files. config: its config.toml; None = it has none.

    Raises:
        OSError: a file cannot be read.
        RecordError: it holds something else; the sentence names file and line.
        ConfigError, DiskError: see `new_path`.
    """
    imported = ImportedJournal()
    with new_path(out) as folder:
        folder.mkdir()
        if config is not None:
            write_bytes(folder / CONFIG, config)
        journal = _Journal(folder)
        for path in paths:
            for item in _items(path, imported.notes):
                journal.add(_read(item, imported), item.where)
            bar.advance(episodes=imported.num_episodes)
        journal.flush()
        if not imported.num_episodes:
            raise ConfigError(f"{paths[0]} holds no episodes; name trajectories of ATIF, or messages.")
        imported.files = journal.names
    return imported


def _read(item: _Row, imported: ImportedJournal) -> Imported:
    # An id of its own for each: groups of one.
    id = f"g{imported.num_episodes}-0"
    if "schema_version" in item.value:
        imported.formats["atif"] += 1
        found = imported_of(item.value, id, item.where, item.trial)
        imported.notes.update({BARE: found.num_bare} if found.num_bare else {})
        return found
    if "messages" in item.value:
        imported.formats["messages"] += 1
        return Imported(messages.imported_of(item.value, id, item.where))
    raise RecordError(
        f"{item.where} holds neither a trajectory of ATIF, which has `schema_version`, nor a conversation, "
        "which has `messages`"
    )


def _items(path: Path, notes: Counter[str]) -> Iterator[_Row]:
    if path.name.endswith(DOCUMENT):
        value = lines.object_of(read_file(path, most=MAX_BYTES), str(path))
        yield _Row(value, str(path), _trial_of(path))
        return
    with open_file(path) as file:
        yield from _lines(GzipFile(fileobj=file) if path.name.endswith(GZIP) else file, path, notes)


def _trial_of(path: Path) -> Trial | None:
    """The trial of TRIAL/agent/trajectory.json, by TRIAL/result.json.

    Raises:
        RecordError: that holds something else than JSON, or a reward that is no number of JSON.
    """
    result = path.parent.parent / "result.json"
    if path.parent.name != "agent" or not result.is_file():
        return None
    found = lines.object_of(read_file(result), str(result))
    verifier = found.get("verifier_result")
    rewards = verifier.get("rewards") if isinstance(verifier, dict) else None
    task = found.get("task_name")
    try:
        reward = number_of(rewards.get("reward")) if isinstance(rewards, dict) else None
    except OverflowError:
        raise RecordError(f"{result} holds a reward of many digits") from None
    return Trial(reward, task if isinstance(task, str) else None)


def _lines(file: BufferedIOBase, path: Path, notes: Counter[str]) -> Iterator[_Row]:
    number = 0
    while line := _line(file, path, number + 1, notes):
        number += 1
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            item = _Row(lines.object_of(line, where), where)
        except RecordError:
            if line.endswith(b"\n"):
                raise
            notes[INCOMPLETE] += 1
            return
        yield item


def _line(file: BufferedIOBase, path: Path, number: int, notes: Counter[str]) -> bytes:
    try:
        line = file.readline(MAX_BYTES + 1)
    except EOFError:
        # What a packed file that was cut off still holds has been read.
        notes[INCOMPLETE] += 1
        return b""
    except (zlib.error, BadGzipFile) as error:
        raise RecordError(f"{path} line {number} cannot be unpacked: {error}") from None
    if len(line) > MAX_BYTES:
        raise RecordError(f"{path} line {number} has more than {MAX_BYTES:,} bytes")
    return line


class _Journal:
    """The files of a new journal. Lines wait for each other, so that a file has few members."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, list[bytes]] = defaultdict(list)
        self._sizes: Counter[str] = Counter()
        self._ends: dict[str, int] = {}
        self._ids: set[tuple[str, str]] = set()
        self.names: set[str] = set()

    def add(self, found: Imported, where: str) -> None:
        """Add an entry to its file.

        Raises:
            RecordError: the name of its file is none of a journal, or the file has an episode of its id.
        """
        name = found.file or eval_name("imported", 0)
        if not _FILE.fullmatch(name):
            raise RecordError(f"{where}: {name[:80]!r} is no name of a file of a journal")
        id = (name, found.entry.episode.id)
        if id in self._ids:
            raise RecordError(f"{where}: episode {id[1]} of {name} is there twice")
        self._ids.add(id)
        self._check(name, found.entry, where)
        self.names.add(name)
        line = to_line(found.entry)
        self._waiting[name].append(line)
        self._sizes[name] += len(line)
        if self._sizes[name] >= _MEMBER:
            self._write(name)
        elif self._sizes.total() >= _MOST_PENDING:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        for name in [*self._waiting]:
            self._write(name)

    def _check(self, name: str, entry: Entry, where: str) -> None:
        is_eval = Path(name).name.startswith("eval_")
        if (entry.outcome == "evaluated") != is_eval:
            raise RecordError(f"{where}: an episode that is {entry.outcome} does not belong into {name}")

    def _write(self, name: str) -> None:
        *home, file = name.split("/")
        path = self._folder.joinpath(*home, JOURNAL, f"{file}{SUFFIX}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._ends[name] = members.append(path, self._waiting.pop(name), at=self._ends.get(name, 0))
        del self._sizes[name]
