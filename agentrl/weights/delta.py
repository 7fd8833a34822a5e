"""What changed from one version of weights to the next, bit for bit, as a file.

Weights are compared as words of their dtype's size, never as numbers: a NaN keeps its payload, and -0.0 is
not 0.0. Of each tensor the changed words go along with their places, or, where that is less, the whole
tensor; one that did not change is left out. The file is safetensors:

    NAME|at, NAME|is   places and words that changed        NAME|all   every word
    metadata           format, and the checksums of what it is applied to (base), and of the result
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

from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights.checksum import added_up, digests_of
from agentrl.weights.codec import dtype_named, slices

_FORMAT = "agentrl-delta-1"
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

Words = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32] | npt.NDArray[np.uint64]


class DeltaError(ValueError):
    """A delta that cannot be made, read or applied; the text says why."""


class Change(NamedTuple):
    """Words of one tensor. at: where they belong, in row-major order; None = they are all of it."""

    at: Words | None
    words: Words


class Delta(NamedTuple):
    """Leads from weights with the checksum `base` to weights with the checksum `result`."""

    base: int
    result: int
    changes: Mapping[str, Change]

    @property
    def num_bytes(self) -> int:
        """What it takes to send it, apart from names (bytes)."""
        places = sum(change.at.nbytes for change in self.changes.values() if change.at is not None)
        return places + sum(change.words.nbytes for change in self.changes.values())


def delta_between(base: Iterable[Bucket], result: Iterable[Bucket]) -> Delta:
    """What leads from one version to the other, however each is cut into buckets.

    Raises:
        DeltaError: they are not versions of one model.
    """
    before, after = list(base), list(result)
    old, new = _by_name(before), _by_name(after)
    strange = old.keys() ^ new.keys() or {name for name in old if old[name][0] != new[name][0]}
    if strange:
        raise DeltaError(f"tensor {min(strange)} is not the same in both versions; send all of the weights")
    compared = {name: _change(_words(*old[name]), _words(*new[name])) for name in new}
    changes = {name: change for name, change in compared.items() if change is not None}
    return Delta(checksum_of(before), checksum_of(after), changes)


def apply(delta: Delta, base: Sequence[Bucket]) -> list[Bucket]:
    """The version that a delta leads to, in new memory, cut as `base` is.

    Raises:
        DeltaError: `base` is not what the delta was made from, or what comes out is not what it leads to.
    """
    if checksum_of(base) != delta.base:
        raise DeltaError("the delta belongs to other weights than these; begin with a full version")
    result = [Bucket(bucket.tensors, bucket.data.copy()) for bucket in base]
    kept = _by_name(result)
    for name, change in delta.changes.items():
        if name not in kept:
            raise DeltaError(f"the delta changes {name}, which the model does not have; write it again")
        _put(name, kept[name], change)
    if checksum_of(result) != delta.result:
        raise DeltaError("the delta is damaged: applied, it does not give what it promises; write it again")
    return result


def write(delta: Delta, path: Path) -> None:
    """Write a file that appears whole or not at all."""
    tensors: dict[str, Words] = {}
    for name, (at, words) in delta.changes.items():
        if at is None:
            tensors[f"{name}|all"] = words
        else:
            tensors |= {f"{name}|at": at, f"{name}|is": words}
    told = {"format": _FORMAT, "base": str(delta.base), "result": str(delta.result)}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, unfinished, told)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> Delta:
    """Read what `write` wrote.

    Raises:
        DeltaError: the file is missing, cut off, or something else.
    """
    try:
        with safe_open(path, "np") as file:
            told = file.metadata() or {}
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise DeltaError(f"{path} cannot be read ({error}); write it again") from error
    base, result = told.get("base", ""), told.get("result", "")
    if told.get("format") != _FORMAT or not (base.isdecimal() and result.isdecimal()):
        raise DeltaError(f"{path} is no delta of weights; name a file that one was written to")
    changes = {}
    for key, words in tensors.items():
        name, _, part = key.rpartition("|")
        if part == "all":
            changes[name] = Change(None, words)
        elif part == "is" and f"{name}|at" in tensors:
            changes[name] = Change(tensors[f"{name}|at"], words)
    return Delta(int(base), int(result), changes)


def checksum_of(buckets: Iterable[Bucket]) -> int:
    """The checksum of weights in buckets, the same as `agentrl.weights.checksum` computes of tensors."""
    return added_up(digest for bucket in buckets for digest in digests_of(bucket))


def _by_name(buckets: Iterable[Bucket]) -> dict[str, tuple[TensorSpec, npt.NDArray[np.uint8]]]:
    return {spec.name: (spec, data) for bucket in buckets for spec, data in slices(bucket)}


def _words(spec: TensorSpec, data: npt.NDArray[np.uint8]) -> Words:
    """A tensor's bytes as words of its dtype's size, or, where there are none so long, of 8 bytes."""
    kind = _WORDS[min(dtype_named(spec.dtype).itemsize, 8)]
    # Tensors in a bucket need not begin where their dtype may.
    aligned = data if data.ctypes.data % 8 == 0 else data.copy()
    return aligned.view(kind)


def _change(old: Words, new: Words) -> Change | None:
    at = np.flatnonzero(old != new)
    if not at.size:
        return None
    places: Words = at.astype(np.uint32) if new.size <= 2**32 else at.astype(np.uint64)
    if places.nbytes + at.size * new.itemsize >= new.nbytes:
        return Change(None, new.copy())
    words: Words = new[at]
    return Change(places, words)


def _put(name: str, kept: tuple[TensorSpec, npt.NDArray[np.uint8]], change: Change) -> None:
    spec, data = kept
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
