"""Writing a journal in another format: an episode at a time, and the whole or nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from agentrl.errors import ConfigError
from agentrl.records import read_journal
from agentrl.runtime.files import disk_errors, write_bytes
from agentrl.runtime.ownership import read_file
from agentrl.runtime.temporary import temporary_folder
from agentrl.view.episodes.journals import JournalFile
from agentrl.view.formats.provenance import Provenance
from agentrl.view.formats.table import CONFIG, Format


class Bar(Protocol):
    """Shows how far a command is."""

    def advance(self, n: int = 1, **fields: float) -> None:
        """A file is done; the fields are figures to show."""


@dataclass(slots=True)
class Exported:
    """What was written. num_episodes: of which something was (count). left_out: parts, by reason (count)."""

    num_episodes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


@contextmanager
def new_path(out: Path) -> Iterator[Path]:
    """A path for a new file or folder, which gets its place where the block ends without an error.

    Raises:
        ConfigError: there is something in its place, or no folder can be made for it.
        DiskError: the disk does not take what is written.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists; name a new place with --out, or remove it.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out.parent} cannot be made ({error.strerror}); choose another --out.") from None
    remedy = "make room there, or choose another --out"
    with disk_errors(out.parent, remedy), temporary_folder("export", base=out.parent) as folder:
        made = folder / "made"
        yield made
        os.rename(made, out)


def chosen(journals: Sequence[JournalFile], pattern: str) -> list[JournalFile]:
    """The files whose names fit a pattern, such as `step_*`.

    Raises:
        ConfigError: there are none.
    """
    found = [journal for journal in journals if fnmatchcase(Path(journal.key).name, pattern)]
    if not found:
        names = ", ".join(journal.key for journal in journals[:10])
        raise ConfigError(f"no file of the journal fits `{pattern}`; its files are {names}.")
    return found


def export(
    journals: Sequence[JournalFile],
    format: Format,
    out: Path,
    bar: Bar,
    model_of: Callable[[Path], str | None],
) -> Exported:
    """Write all episodes of some files. A folder of ATIF gets the config.toml of their run, too.

    model_of: the directory of the model that the run in a folder began with; None = it names none.

    Raises:
        OSError, RecordError: a file of the journal cannot be read.
        ConfigError, DiskError: see `new_path`.
    """
    exported = Exported()
    with new_path(out) as path:
        with format.open(path, out.name) as sink:
            for journal in journals:
                place = Provenance.of(journal, model_of(journal.home))
                for entry in read_journal(journal.path):
                    added = sink.add(entry, place)
                    exported.left_out.update(added.left_out)
                    exported.num_episodes += added.is_written
                bar.advance(episodes=exported.num_episodes)
        homes = {journal.home for journal in journals}
        config = journals[0].home / CONFIG
        if format.name == "atif" and path.is_dir() and len(homes) == 1 and config.exists():
            write_bytes(path / CONFIG, read_file(config))
    return exported


def left_out_text(left_out: Mapping[str, int]) -> str:
    """What was left out, as a sentence; empty where nothing was."""
    parts = [f"{number:,} {reason}" for reason, number in sorted(left_out.items())]
    return f"Left out: {', '.join(parts)}." if parts else ""
