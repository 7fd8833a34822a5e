"""Safetensors files, written tensor by tensor: the manifest gives the header, and no tensor is buffered."""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import size_of

FILE_BYTES = 2 << 30
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
"""Hugging Face's names of the only file of a model, and of what says in which of several a tensor is."""

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in _CODES.items()}
# Readers map the file: the data after the header is aligned for every dtype.
_ALIGNMENT = 8


def dtype_of_code(code: str) -> str:
    """The torch name of a safetensors dtype code (`BF16`: `bfloat16`); an unsupported code as it is."""
    return _NAMES.get(code, code)


class SafetensorsFile:
    """A new safetensors file for the tensors of a manifest, written in its order; a context manager.

    It is closed with its last tensor.

    Raises:
        ValueError: the manifest names a tensor twice, or has a dtype that safetensors does not support; the
            block ended without an error before all tensors were written.
        FileExistsError: the file exists already.
    """

    def __init__(self, path: Path, manifest: Sequence[TensorSpec]) -> None:
        self._path = path
        self._remaining = deque(manifest)
        header = _header(manifest)
        self._file = path.open("xb")
        self._file.write(header)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if self._remaining and error is None:
            raise ValueError(f"{self._path} is incomplete: {self._remaining[0].name} was not written")

    def put(self, spec: TensorSpec, data: npt.NDArray[np.uint8]) -> None:
        """Append a tensor. data: its bytes in row-major order.

        Raises:
            ValueError: it is not the next tensor of the manifest, or has another number of bytes.
        """
        expected = self._remaining.popleft() if self._remaining else None
        if spec != expected:
            raise ValueError(f"{self._path} takes {expected or 'no more tensors'}, not {spec}")
        if data.nbytes != size_of(spec):
            raise ValueError(f"{spec.name} has {size_of(spec)} bytes, not {data.nbytes}")
        self._file.write(data.data)
        if not self._remaining:
            self._file.close()


def write_model(
    folder: Path,
    manifest: Sequence[TensorSpec],
    tensors: Iterable[tuple[TensorSpec, npt.NDArray[np.uint8]]],
    *,
    file_bytes: int = FILE_BYTES,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a model's tensors in the order of the manifest, with an index where there are several files.

    files: the file of each tensor of the manifest, by its name; None = one, or several of about `file_bytes`
    under Hugging Face's names.

    Raises:
        ValueError: `tensors` differ from the manifest.
    """
    files = _by_size(manifest, file_bytes) if files is None else files
    parts: dict[str, list[TensorSpec]] = {}
    for spec in manifest:
        parts.setdefault(files[spec.name], []).append(spec)
    opened: dict[str, SafetensorsFile] = {}
    with ExitStack() as stack:
        for spec, data in tensors:
            if (name := files.get(spec.name)) is None:
                raise ValueError(f"the manifest does not have {spec.name}")
            if name not in opened:
                opened[name] = stack.enter_context(SafetensorsFile(folder / name, parts[name]))
            opened[name].put(spec, data)
    if missing := [part[0].name for name, part in parts.items() if name not in opened]:
        raise ValueError(f"{folder} is incomplete: {missing[0]} was not written")
    if list(parts) != [SINGLE_FILE]:
        index = {
            "metadata": {"total_size": sum(map(size_of, manifest))},
            "weight_map": {spec.name: files[spec.name] for spec in manifest},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _header(manifest: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in manifest:
        if spec.name in entries:
            raise ValueError(f"the manifest has {spec.name} twice")
        if spec.dtype not in _CODES:
            raise ValueError(f"safetensors has no dtype {spec.dtype}")
        begin, end = end, end + size_of(spec)
        entries[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _by_size(manifest: Sequence[TensorSpec], file_bytes: int) -> dict[str, str]:
    """The file of each tensor: one for all, or several of about so many bytes, in order."""
    numbers: list[int] = []
    number = num_bytes = 0
    for spec in manifest:
        size = size_of(spec)
        if num_bytes and num_bytes + size > file_bytes:
            number, num_bytes = number + 1, 0
        num_bytes += size
        numbers.append(number)
    names = [f"model-{n + 1:05d}-of-{number + 1:05d}.safetensors" for n in range(number + 1)]
    if len(names) == 1:
        names = [SINGLE_FILE]
    return {spec.name: names[number] for spec, number in zip(manifest, numbers, strict=True)}
