"""A Megatron directory: weights as the tensor ranks have them, one file for each layer and rank.

    megatron.json                             what it is
    hf/                                       all of the Hugging Face directory but its weights
    tensor-0/embedding.safetensors            shards of tensor rank 0, under Megatron's names
    tensor-0/layer-00000.safetensors
    tensor-0/head.safetensors                 the last norm, and the head where it is not the embedding
    tensor-1/...

What is not cut is in every rank's files. Pipeline stages leave no trace: a stage is some of the layers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from agentrl.checkpoints.export import copy_without_weights
from agentrl.checkpoints.tensors import open_tensors, specs_in, tensor_shapes
from agentrl.config import Section
from agentrl.errors import ConfigError, ModelLoadError
from agentrl.protocols import TensorSpec
from agentrl.trainer.megatron.config import MegatronConfig, Size
from agentrl.trainer.megatron.files.checkpoint import config_of
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.shape import Shape, check_layout, shape_of
from agentrl.weights import manifest_of
from agentrl.weights.codec import bytes_of
from agentrl.weights.streamed import SafetensorsFile

ABOUT, HF = "megatron.json", "hf"

Dtype = Literal["float32", "bfloat16"]


class SavedLayout(Section):
    """What of a layout the files depend on."""

    tensor_model_parallel_size: Size
    """Ranks that share every matrix (count)."""

    def check(self, shape: Shape) -> None:
        """See that so many ranks can share the model evenly.

        Raises:
            ConfigError: naming the size.
        """
        ranks = self.tensor_model_parallel_size
        check_layout(shape, MegatronConfig(tensor_model_parallel_size=ranks, actor_num_gpus_per_node=ranks))


class About(Section):
    """What megatron.json says."""

    format: Literal[1] = 1
    """Of this directory; another one would be read otherwise."""
    dtype: Dtype
    """Of every tensor."""
    layout: SavedLayout
    """How they are cut."""


def file_of(placed: Placed) -> str:
    """The name of the file that a parameter's shards are in, one in each rank's folder."""
    if placed.layer is not None:
        return f"layer-{placed.layer:05d}.safetensors"
    kind = "embedding" if placed.rule.megatron.startswith("embedding.") else "head"
    return f"{kind}.safetensors"


def files_of(shape: Shape) -> dict[str, tuple[Placed, ...]]:
    """The files of a rank's folder and the parameters in each, in the order of the layers."""
    return {name: tuple(placed) for name, placed in groupby(shape.rules(), file_of)}


def begin_directory(folder: Path, about: About, *, like: Path) -> None:
    """Make a Megatron directory without any shards yet; all else is as it is in the Hugging Face directory
    `like`."""
    copy_without_weights(like, folder / HF, dtype=about.dtype)
    (folder / ABOUT).write_text(json.dumps(about.model_dump(), indent=2) + "\n", encoding="utf-8")


def write_shards(folder: Path, rank: int, shards: Mapping[Placed, Tensor]) -> None:
    """Write shards of one tensor rank, whole files of them, in the order of the layers.

    Raises:
        FileExistsError: a file of these has been written.
    """
    below = rank_folder(folder, rank)
    below.mkdir(exist_ok=True)
    for name, group in groupby(shards, file_of):
        named = [(placed.megatron, shards[placed]) for placed in group]
        manifest = manifest_of(named)
        with SafetensorsFile(below / name, manifest) as file:
            for spec, (_, shard) in zip(manifest, named, strict=True):
                file.put(spec, bytes_of(shard))


def rank_folder(folder: Path, rank: int) -> Path:
    """Where the shards of a tensor rank are."""
    return folder / f"tensor-{rank}"


class ShardedCheckpoint:
    """A Megatron directory, shard by shard. Every file has been looked into, none is held open.

    Raises:
        ModelLoadError: it is none; or a file is missing, cut short, or of another model.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        about = _about(self.directory / ABOUT)
        self.dtype: Dtype = about.dtype
        self.tensor_ranks = about.layout.tensor_model_parallel_size
        config = config_of(self.directory / HF)
        self.shape: Shape = shape_of(config)
        try:
            about.layout.check(self.shape)
        except ConfigError as error:
            raise ModelLoadError(f"{self.directory / ABOUT} and {HF}/config.json disagree: {error}") from None
        self._shapes = tensor_shapes(config)
        self._dims = self.shape.dims(self.tensor_ranks)
        for name, placed in files_of(self.shape).items():
            wanted = {spec.name: spec for spec in map(self._shard, placed)}
            for rank in range(self.tensor_ranks):
                _check(rank_folder(self.directory, rank) / name, wanted)

    def read(self, placed: Placed, rank: int) -> Tensor:
        """The shard of a parameter that a tensor rank has."""
        with open_tensors(rank_folder(self.directory, rank) / file_of(placed)) as opened:
            shard: Tensor = opened.get_tensor(placed.megatron)
        return shard

    def join(self, placed: Placed) -> list[Tensor]:
        """The Hugging Face tensors `placed.hf` of a parameter, from all ranks' shards."""
        ranks = range(self.tensor_ranks if placed.rule.is_cut else 1)
        whole = placed.rule.glue([self.read(placed, rank) for rank in ranks])
        return placed.rule.part(whole, self._dims)

    def specs(self, dtype: Dtype | None = None) -> Iterator[TensorSpec]:
        """The Hugging Face tensors, in the order of the layers. dtype: None = as the files have them."""
        for placed in self.shape.rules():
            for name in placed.hf:
                yield TensorSpec(name, self._shapes[name], dtype or self.dtype)

    def _shard(self, placed: Placed) -> TensorSpec:
        """What every rank has of a parameter: the rules are asked, with tensors that hold nothing."""
        parts = [torch.empty(self._shapes[name], device="meta") for name in placed.hf]
        shard = placed.rule.cut(placed.rule.join(parts, self._dims), self.tensor_ranks)[0]
        return TensorSpec(placed.megatron, tuple(shard.shape), self.dtype)


def _about(path: Path) -> About:
    try:
        return About.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error}); name a Megatron directory.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = f"{where}: {first['msg']}" if where else first["msg"]
        raise ModelLoadError(
            f"{path} is not as `agentrl convert` writes it ({said}); convert the model anew."
        ) from None


def _check(path: Path, wanted: Mapping[str, TensorSpec]) -> None:
    with open_tensors(path) as opened:
        found = specs_in(opened)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ModelLoadError(
                f"{path} holds {name} as {_told(found.get(name))}, where the model has "
                f"{_told(wanted.get(name))}; convert the model anew."
            )


def _told(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype} {list(spec.shape)}"
