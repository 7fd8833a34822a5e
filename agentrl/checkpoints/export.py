"""Weights as a Hugging Face directory, written as they come, never held whole."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agentrl.checkpoints.directory import atomic_directory
from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights.codec import slices
from agentrl.weights.streamed import FILE_BYTES, write_model

_LEFT_OUT = shutil.ignore_patterns(
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf"),
    *(".git", ".cache"),
)


def write_directory(
    target: Path, buckets: Iterator[Bucket], *, manifest: Sequence[TensorSpec], like: Path
) -> None:
    """Write the tensors of the buckets; they are taken to their end also where the writing fails.

    Raises:
        ValueError: the buckets hold something else than the manifest says.
    """
    try:
        pieces = (piece for bucket in buckets for piece in slices(bucket))
        write_tensors(target, pieces, manifest=manifest, like=like)
    finally:
        for _ in buckets:
            pass


def write_tensors(
    target: Path,
    tensors: Iterable[tuple[TensorSpec, npt.NDArray[np.uint8]]],
    *,
    manifest: Sequence[TensorSpec],
    like: Path,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write tensors, as bytes and in the order of the manifest, into files of about `file_bytes`.

    All else is as it is in `like`; the directory appears whole or not at all.

    Raises:
        ValueError: something else comes than the manifest says.
    """
    with atomic_directory(target) as coming:
        copy_without_weights(like, coming, dtype=manifest[0].dtype)
        write_model(coming, manifest, tensors, file_bytes=file_bytes)


def copy_without_weights(like: Path, folder: Path, *, dtype: str) -> None:
    """Make `folder` with all of a Hugging Face directory but its weights, which will be of `dtype`."""
    # Only what is in the files: `like` may belong to somebody who let nobody write.
    shutil.copytree(like, folder, ignore=_LEFT_OUT, copy_function=shutil.copyfile)
    folder.chmod(folder.stat().st_mode | stat.S_IRWXU)
    config = folder / "config.json"
    told = json.loads(config.read_text(encoding="utf-8"))
    # transformers would round what it loads to what it reads there.
    changed = {key: dtype for key in ("dtype", "torch_dtype") if told.get(key) not in (None, dtype)}
    if changed:
        config.write_text(json.dumps({**told, **changed}, indent=2) + "\n", encoding="utf-8")
