"""The bitwise difference between two versions of the weights, as a file.

Weights are compared as words of their dtype's size, never as numbers: a NaN keeps its payload, and -0.0 is
not 0.0. A delta stores the changed words of each tensor and their indices, or the complete tensor where that
is smaller; an unchanged tensor is left out. The file is safetensors:

    NAME|at, NAME|is   indices and values of the changed words        NAME|all   every word
    metadata           format, and the checksums of the base version and of the result
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agentrl.runtime.files import SystemErrors
from agentrl.types.seams import Bucket, TensorSpec
from agentrl.weights.checksum import digests_of, sum_digests
from agentrl.weights.codec import slices, torch_dtype

_FORMAT = "agentrl-delta-1"
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Words = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32] | npt.NDArray[np.uint64]


class DeltaError(ValueError):
    """A delta that cannot be computed, read or applied; the message states the reason."""


class TensorChange(NamedTuple):
    """Changed words of one tensor. at: their indices in row-major order; None = all words of the tensor."""

    at: Words | None
    words: Words


class Delta(NamedTuple):
    """Turns weights with the checksum `base` into weights with the checksum `result`."""

    base: int
    result: int
    changes: Mapping[str, TensorChange]

    @property
    def num_bytes(self) -> int:
        """The size of the delta without names (bytes)."""
        indices = sum(change.at.nbytes for change in self.changes.values() if change.at is not None)
        return indices + sum(change.words.nbytes for change in self.changes.values())


def delta_between(base: Iterable[Bucket], result: Iterable[Bucket]) -> Delta:
    """The delta from one version to another; each may be split into buckets in its own way.

    Raises:
        DeltaError: they are not versions of one model.
    """
    before, after = list(base), list(result)
    old, new = _by_name(before), _by_name(after)
    unequal = old.keys() ^ new.keys() or {name for name in old if old[name][0] != new[name][0]}
    if unequal:
        raise DeltaError(f"tensor {min(unequal)} is not the same in both versions; send all of the weights")
    compared = {name: _change(_words(*old[name]), _words(*new[name])) for name in new}
    changes = {name: change for name, change in compared.items() if change is not None}
    return Delta(checksum_of(before), checksum_of(after), changes)


def apply(delta: Delta, base: Sequence[Bucket]) -> list[Bucket]:
    """The result of a delta, in new memory, split into the same buckets as `base`.

    Raises:
        DeltaError: `base` is not the delta's base, or the result has another checksum than the delta states.
    """
    if checksum_of(base) != delta.base:
        raise DeltaError("the delta belongs to other weights than these; begin with a full version")
    result = [Bucket(bucket.tensors, bucket.data.copy()) for bucket in base]
    tensors = _by_name(result)
    for name, change in delta.changes.items():
        if name not in tensors:
            raise DeltaError(f"the delta changes {name}, which the model does not have; write it again")
        _put(name, tensors[name], change)
    if checksum_of(result) != delta.result:
        raise DeltaError("the delta is damaged: its result has another checksum; write it again")
    return result


def write(delta: Delta, path: Path) -> None:
    """Write a delta atomically: the file appears complete or not at all."""
    tensors: dict[str, Words] = {}
    for name, (at, words) in delta.changes.items():
        if at is None:
            tensors[f"{name}|all"] = words
        else:
            tensors |= {f"{name}|at": at, f"{name}|is": words}
    metadata = {"format": _FORMAT, "base": str(delta.base), "result": str(delta.result)}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with SystemErrors(path):
            save_file(tensors, unfinished, metadata)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> Delta:
    """Read a file that `write` has written.

    Raises:
        DeltaError: the file is missing, truncated or no delta.
    """
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise DeltaError(f"{path} cannot be read ({error}); write it again") from error
    base, result = metadata.get("base", ""), metadata.get("result", "")
    if metadata.get("format") != _FORMAT or not (base.isdecimal() and result.isdecimal()):
        raise DeltaError(f"{path} is no delta of weights; name a file that one was written to")
    changes = {}
    for key, words in tensors.items():
        name, _, part = key.rpartition("|")
        if part == "all":
            changes[name] = TensorChange(None, words)
        elif part == "is" and f"{name}|at" in tensors:
            changes[name] = TensorChange(tensors[f"{name}|at"], words)
    return Delta(int(base), int(result), changes)


def checksum_of(buckets: Iterable[Bucket]) -> int:
    """The checksum of weights in buckets, the same as `agentrl.weights.checksum` computes of tensors."""
    return sum_digests(digest for bucket in buckets for digest in digests_of(bucket))


def _by_name(buckets: Iterable[Bucket]) -> dict[str, tuple[TensorSpec, npt.NDArray[np.uint8]]]:
    return {spec.name: (spec, data) for bucket in buckets for spec, data in slices(bucket)}


def _words(spec: TensorSpec, data: npt.NDArray[np.uint8]) -> Words:
    """A tensor's bytes as words of its dtype's size, at most 8 bytes."""
    kind = _WORDS[min(torch_dtype(spec.dtype).itemsize, 8)]
    # Tensors in a bucket may be misaligned for their dtype.
    aligned = data if data.ctypes.data % 8 == 0 else data.copy()
    return aligned.view(kind)


def _change(old: Words, new: Words) -> TensorChange | None:
    at = np.flatnonzero(old != new)
    if not at.size:
        return None
    indices: Words = at.astype(np.uint32) if new.size <= 2**32 else at.astype(np.uint64)
    if indices.nbytes + at.size * new.itemsize >= new.nbytes:
        return TensorChange(None, new.copy())
    words: Words = new[at]
    return TensorChange(indices, words)


def _put(name: str, tensor: tuple[TensorSpec, npt.NDArray[np.uint8]], change: TensorChange) -> None:
    spec, data = tensor
    words = _words(spec, data).copy()
    at: Words | slice = slice(None) if change.at is None else change.at
    fits = change.words.dtype == words.dtype and change.words.ndim == 1
    if change.at is None:
        fits = fits and change.words.size == words.size
    else:
        inside = change.at.size == 0 or int(change.at.max()) < words.size
        fits = fits and change.at.dtype.kind == "u" and change.at.shape == change.words.shape and inside
    if not fits:
        raise DeltaError(f"the delta of {name} does not fit its tensor; write it again")
    words[at] = change.words
    data[:] = words.view(np.uint8)
