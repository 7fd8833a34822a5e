"""Passages: read from Search-R1's JSONL, held in memory or read from a mapped file.

One line is one passage (Search-R1, arXiv:2503.09516): `{"id": "7", "contents": "\\"Title\\"\\nIts text."}`.
"""

from __future__ import annotations

import json
import mmap as mapping
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.errors import UserError
from agentrl.runtime.files import check_fetched

_T = TypeVar("_T")
LINES_FILE = "corpus.jsonl"
OFFSETS_FILE = "corpus.offsets.npy"
_NO_PASSAGE = 'each line is one passage, such as {"id": "7", "contents": "Title\\nIts text."}'


class Texts(Protocol):
    """A sequence of texts, in memory or in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> str: ...


class Watch(Protocol):
    """Reports the progress of a long loop: yields its steps unchanged. total: None = unknown."""

    def __call__(self, steps: Iterable[_T], what: str, total: int | None) -> Iterable[_T]:
        """The same steps."""


def unwatched(steps: Iterable[_T], what: str, total: int | None) -> Iterable[_T]:
    """Reports no progress."""
    del what, total
    return steps


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage. contents: its title on the first line, its text below."""

    id: str
    contents: str

    @property
    def title(self) -> str:
        """The first line, quotation marks included where the corpus has them."""
        return self.contents.partition("\n")[0]

    @property
    def text(self) -> str:
        """All lines but the first."""
        return self.contents.partition("\n")[2]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages in their order: `corpus[row]`.

    Raises:
        ValueError: ids and contents differ in number.
    """

    contents: Texts
    ids: Texts

    def __post_init__(self) -> None:
        if len(self.contents) != len(self.ids):
            raise ValueError(f"{len(self.contents)} contents need as many ids, got {len(self.ids)}")

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, row: int) -> Passage:
        return Passage(self.ids[row], self.contents[row])

    @classmethod
    def of(cls, contents: Sequence[str]) -> Corpus:
        """Texts, numbered from 0."""
        return cls(tuple(contents), tuple(map(str, range(len(contents)))))

    @classmethod
    def read(cls, path: str | Path, *, watch: Watch = unwatched) -> Corpus:
        """Read a JSONL corpus; empty lines are skipped.

        Raises:
            UserError: the file cannot be read, a line (the sentence has its number) is no passage, or there
                is none.
        """
        path = Path(path)
        ids, contents = [], []
        check_fetched([path], UserError)
        try:
            with path.open("rb") as file:
                for number, line in enumerate(watch(file, "reading", None), start=1):
                    if line.strip():
                        passage = _passage(line, f"{path}, line {number}")
                        ids.append(passage.id)
                        contents.append(passage.contents)
        except OSError as error:
            raise UserError(f"The corpus {path} cannot be read: {error.strerror}.") from error
        if not ids:
            raise UserError(f"The corpus {path} is empty: {_NO_PASSAGE}.")
        return cls(tuple(contents), tuple(ids))

    def write(self, folder: Path) -> None:
        """Write the passages and their offsets into a folder."""
        offsets = [0]
        with (folder / LINES_FILE).open("wb") as file:
            for row in range(len(self)):
                passage = {"id": self.ids[row], "contents": self.contents[row]}
                offsets.append(
                    offsets[-1] + file.write(f"{json.dumps(passage, ensure_ascii=False)}\n".encode())
                )
        np.save(folder / OFFSETS_FILE, np.array(offsets, np.int64), allow_pickle=False)

    @classmethod
    def saved(cls, folder: Path, *, mmap: bool) -> Corpus:
        """The corpus that write() wrote. mmap: passages stay on disk, and each access reads one.

        Raises:
            OSError: a file is missing. ValueError: the files are not those of write().
        """
        offsets = np.load(folder / OFFSETS_FILE, mmap_mode="r", allow_pickle=False)
        with (folder / LINES_FILE).open("rb") as file:
            lines = mapping.mmap(file.fileno(), 0, access=mapping.ACCESS_READ)
        if offsets.dtype != np.int64 or offsets.ndim != 1 or offsets[-1] != len(lines):
            raise ValueError("the offsets are not those of the lines")
        contents = _Mapped(lines, np.asarray(offsets), "contents")
        ids = _Mapped(lines, np.asarray(offsets), "id")
        return cls(contents, ids) if mmap else cls(tuple(contents), tuple(ids))


class _Mapped:
    """One field of the lines of a mapped file.

    The reader of bm25s moves one file position that all its callers share; here threads may read at once.
    """

    def __init__(
        self, lines: mapping.mmap, offsets: npt.NDArray[np.int64], key: Literal["id", "contents"]
    ) -> None:
        self._lines = lines
        self._offsets = offsets
        self._key = key

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int, /) -> str:
        line = self._lines[self._offsets[row] : self._offsets[row + 1]]
        return str(json.loads(line)[self._key])

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))


def _passage(line: bytes, where: str) -> Passage:
    try:
        match json.loads(line.decode()):
            case {"id": str() | int() as key, "contents": str(contents)}:
                contents.encode()  # half a surrogate pair can be escaped in JSON, but not encoded
                return Passage(str(key), contents)
    except (ValueError, RecursionError):
        pass
    raise UserError(f"{where} is no passage: {_NO_PASSAGE}.")
