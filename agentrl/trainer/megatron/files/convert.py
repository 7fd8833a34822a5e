"""From a Hugging Face directory to a Megatron directory and back, one layer at a time, without any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from agentrl.checkpoints.directory import whole_directory
from agentrl.checkpoints.export import write_tensors
from agentrl.errors import ConfigError, ModelLoadError
from agentrl.protocols import TensorSpec
from agentrl.trainer.megatron.files.checkpoint import Checkpoint
from agentrl.trainer.megatron.files.sharded import (
    ABOUT,
    HF,
    About,
    Dtype,
    SavedLayout,
    ShardedCheckpoint,
    begin_directory,
    files_of,
    write_shards,
)
from agentrl.trainer.megatron.model.families import Placed
from agentrl.weights import manifest_of
from agentrl.weights.checksum import added_up, digest
from agentrl.weights.codec import bytes_of, dtype_named, size_of

Direction = Literal["to Megatron", "to Hugging Face"]
Stage = Callable[[int], AbstractContextManager[Callable[[], None]]]
"""Is told how many files or parameters there are, and gives what is called after each."""


class Wish(NamedTuple):
    """What was asked for. None: one tensor rank, and the dtype that is there."""

    tensor_ranks: int | None = None
    dtype: Dtype | None = None


class Converted(NamedTuple):
    """What was written. tensors, bytes, checksum: of the Hugging Face tensors, in `dtype`.

    cast_from: what they were before; None = the same.
    """

    direction: Direction
    dtype: Dtype
    cast_from: str | None
    tensors: int
    bytes: int
    checksum: int


def convert(source: Path, target: Path, wish: Wish, stage: Stage) -> Converted:
    """Write `source` in the other form; `target` appears whole or not at all.

    Raises:
        ConfigError: the target is there already, or the ranks do not divide the model.
        ModelLoadError: the source is neither, or it is damaged.
    """
    _refuse_to_overwrite(source, target)
    if (source / ABOUT).is_file():
        return _to_hugging_face(source, target, wish, stage)
    if (source / "config.json").is_file():
        return _to_megatron(source, target, wish, stage)
    raise ModelLoadError(
        f"{source} holds neither a config.json nor a {ABOUT}; name a Hugging Face or a Megatron directory."
    )


def _to_megatron(source: Path, target: Path, wish: Wish, stage: Stage) -> Converted:
    with Checkpoint(source) as checkpoint:
        stored = tuple(checkpoint.specs())
        _refuse_to_lose(checkpoint, stored)
        dtype = wish.dtype or _dtype_of(source, stored)
        ranks = wish.tensor_ranks or 1
        layout, dims = SavedLayout(tensor_model_parallel_size=ranks), checkpoint.shape.dims(ranks)
        layout.check(checkpoint.shape)
        files, tally = files_of(checkpoint.shape), _Tally(dtype)

        def whole(placed: Placed) -> Tensor:
            return placed.rule.join([tally.took(name, checkpoint.read(name))[1] for name in placed.hf], dims)

        with stage(len(files)) as advance, whole_directory(target) as coming:
            begin_directory(coming, About(dtype=dtype, layout=layout), like=source)
            for inside in files.values():
                shards = {placed: placed.rule.cut(whole(placed), ranks) for placed in inside}
                for rank in range(ranks):
                    write_shards(coming, rank, {placed: pieces[rank] for placed, pieces in shards.items()})
                advance()
    return tally.told("to Megatron", stored)


def _to_hugging_face(source: Path, target: Path, wish: Wish, stage: Stage) -> Converted:
    if wish.tensor_ranks is not None:
        raise ConfigError(
            f"{source} is a Megatron directory, whose shards are put together; leave "
            "--tensor-model-parallel-size out."
        )
    checkpoint = ShardedCheckpoint(source)
    parameters = list(checkpoint.shape.rules())
    tally = _Tally(wish.dtype or checkpoint.dtype)
    with stage(len(parameters)) as advance:

        def tensors() -> Iterator[tuple[TensorSpec, npt.NDArray[np.uint8]]]:
            for placed in parameters:
                for name, tensor in zip(placed.hf, checkpoint.join(placed), strict=True):
                    spec, written = tally.took(name, tensor)
                    yield spec, bytes_of(written)
                advance()

        write_tensors(target, tensors(), manifest=tuple(checkpoint.specs(tally.dtype)), like=source / HF)
    return tally.told("to Hugging Face", tuple(checkpoint.specs()))


class _Tally:
    """Casts the tensors that go by, and keeps a digest of each."""

    def __init__(self, dtype: Dtype) -> None:
        self.dtype = dtype
        self._digests: list[int] = []
        self._bytes = 0

    def took(self, name: str, tensor: Tensor) -> tuple[TensorSpec, Tensor]:
        """The tensor as it will be written."""
        tensor = tensor.to(dtype_named(self.dtype))
        (spec,) = manifest_of([(name, tensor)])
        self._digests.append(digest(spec, bytes_of(tensor)))
        self._bytes += size_of(spec)
        return spec, tensor

    def told(self, direction: Direction, stored: Sequence[TensorSpec]) -> Converted:
        """All that went by. stored: the tensors as they were read."""
        before = sorted({spec.dtype for spec in stored} - {self.dtype})
        return Converted(
            direction,
            self.dtype,
            " and ".join(before) or None,
            len(self._digests),
            self._bytes,
            added_up(self._digests),
        )


def _dtype_of(source: Path, stored: Sequence[TensorSpec]) -> Dtype:
    found = {spec.dtype for spec in stored}
    if len(found) > 1 or not found <= set(get_args(Dtype)):
        raise ConfigError(
            f"{source} holds tensors of {' and '.join(sorted(found))}, a Megatron directory holds one of "
            f"{' and '.join(get_args(Dtype))}; say which with --dtype."
        )
    return cast(Dtype, found.pop())


def _refuse_to_overwrite(source: Path, target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError(f"{target} is there already, and would be lost; name another target, or remove it.")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"{target} lies inside of {source}; name a target beside it.")


def _refuse_to_lose(checkpoint: Checkpoint, stored: Sequence[TensorSpec]) -> None:
    known = {spec.name for spec in stored} | ({"lm_head.weight"} if checkpoint.shape.tied else set())
    # Frequencies follow from the config; older files hold them all the same.
    strangers = [name for name in checkpoint.names - known if not name.endswith(".rotary_emb.inv_freq")]
    if strangers:
        raise ModelLoadError(
            f"{checkpoint.directory} holds {len(strangers)} tensors that no such model has, {min(strangers)} "
            "among them, and Megatron would lose them; is its config.json its own?"
        )
