"""Weights as a Hugging Face directory, written bucket by bucket, never all in memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.runtime.files import SystemErrors
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.codec import slices
from agentrl.weights.hf.directory import atomic_directory
from agentrl.weights.quiet import quiet_transformers
from agentrl.weights.streamed import FILE_BYTES, write_model


# A trained model as a Hugging Face directory.
def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str,
    *,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer as a Hugging Face directory, atomically. state: in place of the model's own.

    Raises:
        OSError: the disk did not take it.
    """
    with atomic_directory(Path(directory)) as partial, SystemErrors(Path(directory)):
        with quiet_transformers():
            model.save_pretrained(partial, state_dict=None if state is None else dict(state))
        tokenizer.save_pretrained(partial)


_IGNORED_FILES = shutil.ignore_patterns(
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf"),
    *(".git", ".cache"),
)


def write_directory(
    target: Path, buckets: Iterator[Bucket], *, manifest: Sequence[TensorSpec], like: Path
) -> None:
    """Write the tensors of the buckets; the iterator is exhausted also where writing fails.

    Raises:
        ValueError: the buckets do not match the manifest.
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

    All other files are copied from `like`; the write is atomic.

    Raises:
        ValueError: the tensors do not match the manifest.
    """
    with atomic_directory(target) as partial:
        copy_without_weights(like, partial, dtype=manifest[0].dtype)
        write_model(partial, manifest, tensors, file_bytes=file_bytes)


def copy_without_weights(like: Path, folder: Path, *, dtype: str) -> None:
    """Copy a Hugging Face directory without its weights to `folder`. dtype: of the new weights."""
    # Contents only, no permissions: `like` may be read-only. shutil.copytree would make one error of several,
    # which does not say any more that the disk is full.
    for place, folders, names in os.walk(like, followlinks=True):
        ignored = _IGNORED_FILES(place, [*folders, *names])
        folders[:] = [name for name in folders if name not in ignored]
        target = folder / Path(place).relative_to(like)
        target.mkdir(parents=True)
        for name in names:
            if name not in ignored:
                shutil.copyfile(Path(place) / name, target / name)
    config = folder / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8"))
    # transformers casts the weights that it loads to the dtype in the config.
    changed = {key: dtype for key in ("dtype", "torch_dtype") if fields.get(key) not in (None, dtype)}
    if changed:
        config.write_text(json.dumps({**fields, **changed}, indent=2) + "\n", encoding="utf-8")
