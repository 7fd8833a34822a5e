"""Safetensors files, written tensor by tensor: the manifest gives the header, and no tensor is buffered."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import size_of

FILE_BYTES = 2 << 30

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

    Raises:
        ValueError: the manifest names a tensor twice, or has a dtype that safetensors does not support; the
            block ended without an error before all tensors were written.
        FileExistsError: the file exists already.
    """

    def __init__(self, path: Path, manifest: Sequence[TensorSpec]) -> None:
        self._path = path
        self._remaining = iter(manifest)
        header = _header(manifest)
        self._file = path.open("xb")
        self._file.write(header)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        missing = next(self._remaining, None)
        if missing is not None and error is None:
            raise ValueError(f"{self._path} is incomplete: {missing.name} was not written")

    def put(self, spec: TensorSpec, data: npt.NDArray[np.uint8]) -> None:
        """Append a tensor. data: its bytes in row-major order.

        Raises:
            ValueError: it is not the next tensor of the manifest, or has another number of bytes.
        """
        expected = next(self._remaining, None)
        if spec != expected:
            raise ValueError(f"{self._path} takes {expected or 'no more tensors'}, not {spec}")
        if data.nbytes != size_of(spec):
            raise ValueError(f"{spec.name} has {size_of(spec)} bytes, not {data.nbytes}")
        self._file.write(data.data)


def write_model(
    folder: Path,
    manifest: Sequence[TensorSpec],
    tensors: Iterable[tuple[TensorSpec, npt.NDArray[np.uint8]]],
    *,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a model's tensors in the order of the manifest, under Hugging Face's file names.

    One file, or several of about `file_bytes` with an index.

    Raises:
        ValueError: `tensors` differ from the manifest.
    """
    parts = list(_parts(manifest, file_bytes))
    names = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = ["model.safetensors"]
    remaining = iter(tensors)
    for name, part in zip(names, parts, strict=True):
        with SafetensorsFile(folder / name, part) as file:
            for spec, data in islice(remaining, len(part)):
                file.put(spec, data)
    if (extra := next(remaining, None)) is not None:
        raise ValueError(f"the manifest does not have {extra[0].name}")
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(map(size_of, manifest))},
            "weight_map": {s.name: name for name, part in zip(names, parts, strict=True) for s in part},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


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


def _parts(manifest: Sequence[TensorSpec], file_bytes: int) -> Iterator[list[TensorSpec]]:
    part: list[TensorSpec] = []
    num_bytes = 0
    for spec in manifest:
        size = size_of(spec)
        if part and num_bytes + size > file_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(spec)
        num_bytes += size
    yield part
