"""The formats that a journal is exported to: what writes each, and what it does not hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from gzip import GzipFile
from io import BufferedIOBase
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Protocol

from agentrl.records import Entry, lines
from agentrl.types import JSON
from agentrl.view.formats.atif import document_of
from agentrl.view.formats.inspect_log import SUFFIX, InspectLog
from agentrl.view.formats.messages import rows_of
from agentrl.view.formats.otel import traces_of
from agentrl.view.formats.provenance import Provenance, readable_line

GZIP, LINES, DOCUMENT, CONFIG = ".gz", ".jsonl", ".json", "config.toml"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST: Final = 100
Convert = Callable[[Entry, Provenance], Iterator[dict[str, JSON] | str]]
"""What is written of an episode; a text in its place says why a part is left out."""


class Added(NamedTuple):
    """Whether anything of an episode was written, and the reasons why parts of it were left out."""

    is_written: bool
    left_out: Sequence[str] = ()


class Sink(Protocol):
    """Writes episodes, in the order of their files, into what its block makes."""

    def __enter__(self) -> Sink: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def add(self, entry: Entry, place: Provenance) -> Added:
        """Write an episode."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format. open: the sink of a new path; name: of the path that the user named. loses: a sentence."""

    name: str
    open: Callable[[Path, str], Sink]
    loses: str


class _Closing:
    """A sink that closes what it has opened, and what it has opened last first."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def __enter__(self) -> _Closing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def add(self, entry: Entry, place: Provenance) -> Added:
        """Write an episode."""
        raise NotImplementedError


class _Lines(_Closing):
    """A file of JSON lines, packed where its name ends with .gz."""

    def __init__(
        self, path: Path, name: str, convert: Convert, line: Callable[[JSON], bytes] = readable_line
    ) -> None:
        super().__init__()
        self._line = line
        self._file: BufferedIOBase = self._open.enter_context(path.open("xb"))
        if name.endswith(GZIP):
            self._file = self._open.enter_context(GzipFile(fileobj=self._file, mode="wb"))
        self._convert = convert

    def add(self, entry: Entry, place: Provenance) -> Added:
        """Write its lines."""
        found = [*self._convert(entry, place)]
        for row in found:
            if not isinstance(row, str):
                self._file.write(self._line(row))
        left_out = [reason for reason in found if isinstance(reason, str)]
        return Added(len(left_out) < len(found), left_out)


class _Documents(_Closing):
    """A folder with a file of JSON for each episode, below the name of its file in the journal.

    Sorted by their names, they are in the order of the journal, which gradients depend on.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._number = 0
        folder.mkdir()

    def add(self, entry: Entry, place: Provenance) -> Added:
        """Write its document."""
        folder = self._folder.joinpath(*map(_name, place.key.split("/")))
        folder.mkdir(parents=True, exist_ok=True)
        self._number += 1
        with (folder / f"{self._number:09d}-{_name(entry.episode.id)}{DOCUMENT}").open("xb") as file:
            file.write(lines.to_line(document_of(entry, place)))
        return Added(is_written=True)


class _Logs(_Closing):
    """A folder with a log of inspect_ai for each file of the journal."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._place: Provenance | None = None
        folder.mkdir()

    def add(self, entry: Entry, place: Provenance) -> Added:
        """Write its sample; a log is complete when the next one begins."""
        if place != self._place:
            self._open.close()
            path = self._folder / f"{_name(place.key.replace('/', '_'))}{SUFFIX}"
            self._log = self._open.enter_context(InspectLog(path, place))
            self._place = place
        self._log.add(entry)
        return Added(is_written=True)


def _name(name: str) -> str:
    """A name as that of a file: an id may hold anything."""
    return _UNSAFE.sub("-", name)[:_LONGEST]


def _documents(entry: Entry, place: Provenance) -> Iterator[dict[str, JSON]]:
    yield document_of(entry, place)


def _traces(entry: Entry, place: Provenance) -> Iterator[dict[str, JSON]]:
    yield traces_of(entry, place)


def _atif(path: Path, name: str) -> Sink:
    is_file = name.removesuffix(GZIP).endswith(LINES)
    return _Lines(path, name, _documents, lines.to_line) if is_file else _Documents(path)


FORMATS: Final[Mapping[str, Format]] = {
    format.name: format
    for format in (
        Format(
            "atif",
            _atif,
            "Nothing of an episode is lost; the definitions of its tools are not in a journal.",
        ),
        Format(
            "messages",
            lambda path, name: _Lines(path, name, rows_of),
            "Lost: tokens, logprobs and versions, rewards of steps and by part, and what tools were defined.",
        ),
        Format(
            "inspect",
            lambda path, _: _Logs(path),
            "Lost: tokens, logprobs and versions (their numbers are kept), rewards of steps, what tools were "
            "defined, and times of day, which a journal has not.",
        ),
        Format(
            "otel",
            lambda path, name: _Lines(path, name, _traces),
            "Lost: tokens, logprobs and versions (their numbers are kept), rewards of steps, what tools were "
            "defined, and times of day, which a journal has not: an episode ends when its file was written.",
        ),
    )
}
"""By the name that `--format` takes."""
