"""Weights as a Hugging Face directory, written file by file, never held whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from agentrl.protocols import Bucket
from agentrl.trainer.directory import whole_directory
from agentrl.weights import unpack

_FILE_BYTES = 2 << 30
_WEIGHTS = "*.safetensors*"


def write_directory(
    target: Path, buckets: Iterator[Bucket], *, like: Path, file_bytes: int = _FILE_BYTES
) -> None:
    """Write the tensors into files of about `file_bytes`; all else is as it is in `like`.

    The buckets are taken to their end also where the writing fails.
    """
    try:
        with whole_directory(target) as coming:
            shutil.copytree(like, coming, ignore=shutil.ignore_patterns(_WEIGHTS), dirs_exist_ok=True)
            _write(coming, buckets, file_bytes)
    finally:
        for _ in buckets:
            pass


def _write(folder: Path, buckets: Iterator[Bucket], file_bytes: int) -> None:
    files: list[dict[str, Tensor]] = [{}]
    places: dict[str, int] = {}
    total = filled = 0
    for bucket in buckets:
        if filled and filled + bucket.data.nbytes > file_bytes:
            save_file(files[-1], folder / _part(len(files)), {"format": "pt"})
            files[-1] = {}
            files.append({})
            filled = 0
        tensors = dict(unpack(bucket))
        files[-1] |= tensors
        places |= dict.fromkeys(tensors, len(files))
        filled += bucket.data.nbytes
        total += bucket.data.nbytes
    if len(files) == 1:
        save_file(files[0], folder / "model.safetensors", {"format": "pt"})
        return
    save_file(files[-1], folder / _part(len(files)), {"format": "pt"})
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: _part(number) for name, number in places.items()},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _part(number: int) -> str:
    return f"model-{number:05d}.safetensors"
