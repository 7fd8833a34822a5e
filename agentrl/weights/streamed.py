"""Safetensors files, written as their tensors come: what will come is known, what has come is not kept."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from agentrl.protocols import TensorSpec
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
# Readers map the file: what follows the header begins where any dtype may.
_ALIGNMENT = 8


def dtype_of_code(code: str) -> str:
    """What safetensors calls `BF16`, as torch prints it; a code that no tensor of ours has, as it is."""
    return _NAMES.get(code, code)


class SafetensorsFile:
    """A new safetensors file for the tensors of a manifest, which come in its order. Use it in a `with`.

    Raises:
        ValueError: the manifest names a tensor twice, or has a dtype that safetensors does not know; a block
            that ended well has left tensors out.
        FileExistsError: there is such a file.
    """

    def __init__(self, path: Path, manifest: Sequence[TensorSpec]) -> None:
        self._path = path
        self._coming = iter(manifest)
        header = _header(manifest)
        self._file = path.open("xb")
        self._file.write(header)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        missing = next(self._coming, None)
        if missing is not None and error is None:
            raise ValueError(f"{self._path} was left without {missing.name}")

    def put(self, spec: TensorSpec, data: npt.NDArray[np.uint8]) -> None:
        """Append a tensor. data: its bytes in row-major order.

        Raises:
            ValueError: it is not the one that is next, or the bytes are not as many as it has.
        """
        expected = next(self._coming, None)
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
    """Write a model's tensors, which come in the order of the manifest, under Hugging Face's names of files.

    One file, or several of about `file_bytes` with an index.

    Raises:
        ValueError: what comes is not what the manifest says.
    """
    parts = list(_parts(manifest, file_bytes))
    names = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = ["model.safetensors"]
    coming = iter(tensors)
    for name, part in zip(names, parts, strict=True):
        with SafetensorsFile(folder / name, part) as file:
            for spec, data in islice(coming, len(part)):
                file.put(spec, data)
    if (extra := next(coming, None)) is not None:
        raise ValueError(f"the manifest does not have {extra[0].name}")
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(map(size_of, manifest))},
            "weight_map": {s.name: name for name, part in zip(names, parts, strict=True) for s in part},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _header(manifest: Sequence[TensorSpec]) -> bytes:
    told: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in manifest:
        if spec.name in told:
            raise ValueError(f"the manifest has {spec.name} twice")
        if spec.dtype not in _CODES:
            raise ValueError(f"safetensors has no dtype {spec.dtype}")
        begin, end = end, end + size_of(spec)
        told[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _parts(manifest: Sequence[TensorSpec], file_bytes: int) -> Iterator[list[TensorSpec]]:
    part: list[TensorSpec] = []
    filled = 0
    for spec in manifest:
        size = size_of(spec)
        if part and filled + size > file_bytes:
            yield part
            part, filled = [], 0
        part.append(spec)
        filled += size
    yield part
