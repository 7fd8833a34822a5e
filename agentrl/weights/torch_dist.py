"""Megatron's distributed checkpoints (torch_dist): tensors by key, read and written a piece at a time.

    latest_checkpointed_iteration.txt      `release`, or a number: which folder
    release/.metadata                      a pickle: the keys, and where the pieces of each are
    release/__0_0.distcp                   the pieces, one after the other
    release/common.pt, metadata.json       what is no tensor; the format

The pickle of a folder from elsewhere is read without running any of it: each class that it names is replaced
by a record of its fields.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from agentrl.errors import ModelLoadError
from agentrl.runtime.files import SystemErrors
from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import torch_dtype
from agentrl.weights.hf.directory import atomic_directory

LATEST, RELEASE = "latest_checkpointed_iteration.txt", "release"
_METADATA, _COMMON, _FORMAT, _DATA = ".metadata", "common.pt", "metadata.json", "__0_0.distcp"
_MAX_METADATA_BYTES, _MAX_LATEST_BYTES = 256 << 20, 64
_DAMAGED = (
    *(OSError, RuntimeError, ValueError, LookupError, ArithmeticError, AttributeError, TypeError, EOFError),
    *(MemoryError, pickle.UnpicklingError),
)
"""What reading a file raises that is not as it was written."""

T = TypeVar("T")


class Chunk(NamedTuple):
    """A part of a tensor. shape: of the whole tensor. offset: of this part in it."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


class _Stored(NamedTuple):
    """Where a piece is."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int

    def holds(self, rows: Sequence[int]) -> bool:
        """Whether a part of these rows of the first axes is in it."""
        first = zip(rows, self.offset, self.sizes, strict=False)
        return all(start <= row < start + size for row, start, size in first)


@dataclass(frozen=True, slots=True)
class TorchDist:
    """An opened checkpoint. specs: of its tensors, by key."""

    folder: Path
    specs: Mapping[str, TensorSpec]
    _pieces: Mapping[str, Sequence[_Stored]]

    @classmethod
    def open(cls, folder: Path) -> TorchDist:
        """Read what a checkpoint holds. folder: its own, or the one above, which names the latest.

        Raises:
            ModelLoadError: it holds no such checkpoint, or a damaged one.
        """
        path = folder / LATEST
        try:
            folder = _iteration(folder)
            path = folder / _METADATA
            if path.stat().st_size > _MAX_METADATA_BYTES:
                raise ValueError(f"more than {_MAX_METADATA_BYTES >> 20} MiB")
            with path.open("rb") as file:
                metadata = _Reader(file).load()
            return cls(folder, *_read(metadata, folder))
        except _DAMAGED as error:
            raise ModelLoadError(f"{path} is not what Megatron writes ({error}); copy it again.") from None

    def read(self, key: str, *rows: int) -> Tensor:
        """A tensor, or one row of its first axis, or of its first axes.

        Raises:
            ModelLoadError: there is none of that key, or a file is cut short or damaged.
        """
        if key not in self.specs:
            raise ModelLoadError(f"{self.folder} has no tensor {key}; is it of another model?")
        shape, dtype = self.specs[key].shape[len(rows) :], torch_dtype(self.specs[key].dtype)
        pieces = [stored for stored in self._pieces[key] if stored.holds(rows)]
        if len(pieces) == 1 and pieces[0].sizes == (*(1 for _ in rows), *shape):
            return self._piece(pieces[0], dtype).reshape(shape)  # as it is: no second copy in memory
        whole = torch.empty(shape, dtype=dtype)
        covered = 0
        for stored in pieces:
            inside = tuple(row - start for row, start in zip(rows, stored.offset, strict=False))
            tensor = self._piece(stored, dtype)[inside]
            offset = stored.offset[len(rows) :]
            place = tuple(
                slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True)
            )
            whole[place].copy_(tensor)
            covered += tensor.numel()
        if covered != whole.numel():
            raise ModelLoadError(f"{self.folder} lacks a part of {key}; copy it again.")
        return whole

    @staticmethod
    def _piece(stored: _Stored, dtype: torch.dtype) -> Tensor:
        try:
            with stored.path.open("rb") as file:
                piece = cast(BinaryIO, _create_file_view(file, stored.start, stored.length))
                tensor = torch.load(piece, weights_only=True, map_location="cpu")
        except _DAMAGED as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelLoadError(
                f"{stored.path} is cut short or damaged ({reason}); copy it again."
            ) from None
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != (stored.sizes, dtype):
            raise ModelLoadError(f"{stored.path} holds another tensor than it says; copy it again.")
        return tensor


def holds_torch_dist(folder: Path) -> bool:
    """Whether a folder is such a checkpoint, or names one."""
    return (folder / _METADATA).exists() or (folder / LATEST).exists()


def write_torch_dist(folder: Path, pieces: Iterable[Chunk], empty: Iterable[str] = ()) -> None:
    """Write a checkpoint, atomically; the pieces are taken one by one. empty: keys of objects that are None.

    Raises:
        OSError: the disk did not take it.
    """
    with atomic_directory(folder) as partial, SystemErrors(folder):
        (partial / RELEASE).mkdir(parents=True)
        (partial / LATEST).write_text(RELEASE, encoding="utf-8")
        with (partial / RELEASE / _DATA).open("xb") as file:
            metadata = _written(file, pieces, empty)
        with (partial / RELEASE / _METADATA).open("xb") as file:
            pickle.dump(metadata, file)
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, partial / RELEASE / _COMMON)
        about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
        text = json.dumps({**about, "common_backend_version": 1})
        (partial / RELEASE / _FORMAT).write_text(text, encoding="utf-8")


def _written(file: BinaryIO, pieces: Iterable[Chunk], empty: Iterable[str]) -> Metadata:
    keys: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}

    def append(value: object, index: MetadataIndex) -> None:
        start = file.tell()
        torch.save(value, file)
        places[index] = _StorageInfo(_DATA, start, file.tell() - start)

    for key, shape, offset, tensor in pieces:
        stored = keys.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), [])
        )
        assert isinstance(stored, TensorStorageMetadata)
        stored.chunks.append(ChunkStorageMetadata(torch.Size(offset), tensor.shape))
        append(tensor.contiguous(), MetadataIndex(key, offset))
    for key in empty:
        keys[key] = BytesStorageMetadata()
        append([None], MetadataIndex(key))
    return Metadata(keys, None, places, None)


def _iteration(folder: Path) -> Path:
    if not (folder / LATEST).exists():
        return folder
    with (folder / LATEST).open("rb") as file:
        name = file.read(_MAX_LATEST_BYTES).decode().strip()
    return folder / (f"iter_{int(name):07d}" if name.isdecimal() else RELEASE)


class _Record:
    """The fields of a pickled object."""

    def __init__(self, *_: object) -> None:
        self.values: tuple[object, ...] = ()

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.fields = {str(name): value for name, value in state.items()}
        elif isinstance(state, tuple):
            self.values = state

    fields: Mapping[str, object] = {}

    def field(self, name: str, kind: type[T]) -> T:
        """A field of a type.

        Raises:
            ValueError: it is missing, or of another type.
        """
        value = self.fields.get(name)
        if not isinstance(value, kind):
            raise ValueError(f"{name} is missing")
        return value


class _Tensor(_Record):
    pass


class _Reader(pickle.Unpickler):
    """Reads a pickle as records: it finds no class, and calls nothing but `tuple`."""

    def find_class(self, module: str, name: str) -> object:
        """What stands for a name."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch":
            return name
        return _Tensor if name == TensorStorageMetadata.__name__ else _Record


def _read(metadata: object, folder: Path) -> tuple[dict[str, TensorSpec], dict[str, list[_Stored]]]:
    if not isinstance(metadata, _Record):
        raise ValueError("it is no metadata")
    found: dict[str, dict[object, _Record]] = {}
    for index, info in metadata.field("storage_data", dict).items():
        if isinstance(index, _Record) and isinstance(info, _Record):
            found.setdefault(index.field("fqn", str), {})[index.fields.get("offset")] = info
    specs, pieces = {}, {}
    for key, stored in metadata.field("state_dict_metadata", dict).items():
        if isinstance(stored, _Tensor):
            dtype, shape = (
                str(stored.field("properties", _Record).values[0]),
                _sizes(stored.field("size", tuple)),
            )
            torch_dtype(dtype)
            specs[str(key)] = TensorSpec(str(key), shape, dtype)
            chunks = stored.field("chunks", list)
            pieces[str(key)] = [_stored(chunk, found.get(str(key), {}), folder) for chunk in chunks]
            _check_places(str(key), shape, pieces[str(key)])
    return specs, pieces


def _stored(chunk: object, infos: Mapping[object, _Record], folder: Path) -> _Stored:
    if not isinstance(chunk, _Record):
        raise ValueError("a chunk has no offsets")
    offset, sizes = (_sizes(chunk.field(name, tuple)) for name in ("offsets", "sizes"))
    info = infos.get(offset)
    if info is None:
        raise ValueError(f"the place of the chunk at {list(offset)} is missing")
    name = info.field("relative_path", str)
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no file of the folder")
    return _Stored(offset, sizes, folder / name, info.field("offset", int), info.field("length", int))


def _check_places(key: str, shape: tuple[int, ...], pieces: Sequence[_Stored]) -> None:
    """Check that the pieces are parts of the tensor, and together as large.

    Raises:
        ValueError: they are not.
    """
    for piece in pieces:
        ends = [start + size for start, size in zip(piece.offset, piece.sizes, strict=True)]
        if len(ends) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"a chunk of {key} is outside of it")
    places = {piece.offset for piece in pieces}
    if len(places) < len(pieces) or sum(prod(piece.sizes) for piece in pieces) != prod(shape):
        raise ValueError(f"the chunks of {key} are not all of it, each once")


def _sizes(values: tuple[object, ...]) -> tuple[int, ...]:
    sizes = tuple(value for value in values if isinstance(value, int) and value >= 0)
    if len(sizes) != len(values):
        raise ValueError(f"{values!r} are no sizes")
    return sizes
