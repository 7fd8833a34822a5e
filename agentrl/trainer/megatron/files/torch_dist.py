"""Hugging Face directories and Megatron's distributed checkpoints, one as the other, bit for bit.

A layer's tensors stand under one key for all layers, whose first axis is the layer's number; those of experts
under one for all of them, whose next axis is the expert's. Where layers differ, each has keys of its own. A
norm stands under the matrix after it, if that is one, in TransformerEngine's layers and in Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from agentrl.errors import ModelLoadError
from agentrl.trainer.megatron.files.checkpoint import CheckpointReader, config_of
from agentrl.trainer.megatron.model.families import Placed
from agentrl.trainer.megatron.model.rules import Run, unshard
from agentrl.trainer.megatron.model.shape import Shape, num_ahead, shape_of, tensor_shapes_of
from agentrl.types.seams import TensorSpec
from agentrl.weights.codec import bytes_of
from agentrl.weights.hf.ahead import StillLayers
from agentrl.weights.hf.export import write_tensors
from agentrl.weights.hf.folders import check_has_config
from agentrl.weights.hf.tensors import TensorFiles
from agentrl.weights.torch_dist import Chunk, TorchDist, write_torch_dist

_NORMS: Mapping[str, str] = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LATENT_NORMS: Mapping[str, str] = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_LAYERS, _AHEAD = "decoder.layers.", "mtp.layers."
_EXPERTS, _OF_EXPERT = "mlp.experts.experts", ("linear_fc1", "linear_fc2")
_MATRICES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


class MegatronTensors:
    """A distributed checkpoint by Hugging Face names. like: a directory with the model's config.json.

    Raises:
        ModelLoadError: it is no such checkpoint, or of a model that has no table, or linear attention.
    """

    def __init__(self, folder: Path, like: Path) -> None:
        check_has_config(like)
        config = config_of(like)
        _check_attention(shape_of(config), like)
        self.opened = TorchDist.open(folder)
        self._shape = shape_of(config)
        if any(key.startswith(_AHEAD) for key in self.opened.specs):
            self._shape = self._shape._replace(ahead=num_ahead(config))
        self._shapes = tensor_shapes_of(self._shape, config)
        self._placed = {name: tuple(every) for name, every in self._shape.by_tensor().items()}
        # Queries, keys and values are one parameter: it is read once.
        self._last: tuple[Placed, list[Tensor]] | None = None

    @property
    def manifest(self) -> tuple[TensorSpec, ...]:
        """All tensors, in the order of the layers.

        Raises:
            ModelLoadError: one is missing.
        """
        return tuple(
            TensorSpec(name, self._shapes[name], self.opened.specs[self._key(placed)[0]].dtype)
            for name, (placed, *_) in self._placed.items()
        )

    def read(self, name: str) -> Tensor:
        """A tensor.

        Raises:
            ModelLoadError: it is missing, or of another shape.
        """
        placed = self._placed[name]
        if self._last is None or self._last[0] is not placed[0]:
            self._last = None  # before the next ones are in memory, too
            self._last = placed[0], self._unsharded(placed)
        return self._last[1][placed[0].hf.index(name)]

    def _unsharded(self, every: tuple[Placed, ...]) -> list[Tensor]:
        """The tensors that some parameters make, each of them a part of all."""
        tensors: list[Tensor] = []
        for placed in every:
            parameter = self.opened.read(*self._key(placed))
            shapes = [self._shapes[name] for name in placed.hf]
            tensors = tensors or [torch.empty(shape, dtype=parameter.dtype) for shape in shapes]
            try:
                unshard(placed.rule, parameter, Run(0, 1), tensors, self._shape.dims(1))
            except (RuntimeError, ValueError) as error:
                raise ModelLoadError(
                    f"{self.opened.folder} holds {placed.megatron} as {list(parameter.shape)}, which is not "
                    "that of the config.json; name the directory of the same model."
                ) from error
        return tensors

    def _key(self, placed: Placed) -> tuple[str, *tuple[int, ...]]:
        """The key of a parameter, and its rows there."""
        # As TransformerEngine's layers have it, or by Megatron's own name.
        names = (_stored_name(placed, self._shape), *_names_of(placed))
        keys = [_key_of(placed, name, apart=apart) for name in names for apart in (False, True)]
        found = next((key for key in keys if key[0] in self.opened.specs), None)
        if found is None:
            raise ModelLoadError(f"{self.opened.folder} lacks {placed.megatron}; is it of another model?")
        return found


def to_hugging_face(folder: Path, like: Path, target: Path) -> int:
    """Write a distributed checkpoint as a Hugging Face directory, and compare what was written.

    like: a directory with config, tokenizer and all else, which may be weights: then its layers that predict
    further ahead are taken from there, if the checkpoint has none. Returns the number of tensors.

    Raises:
        ModelLoadError: see `MegatronTensors`; or what was written is not what was read.
        OSError: the disk did not take it.
    """
    source = MegatronTensors(folder, like)
    manifest = source.manifest
    still = StillLayers(like, manifest)
    pieces = still.after((spec, bytes_of(source.read(spec.name))) for spec in manifest)
    write_tensors(target, pieces, manifest=[*manifest, *still.specs], like=like)
    with TensorFiles(target) as written:
        _compare(target, ((spec.name, source.read(spec.name), written.read(spec.name)) for spec in manifest))
    return len(manifest)


def to_torch_dist(directory: Path, target: Path) -> int:
    """Write a Hugging Face directory as a distributed checkpoint, and compare what was written.

    Returns the number of tensors.

    Raises:
        ModelLoadError: the directory holds no model that Megatron trains, or one with linear attention; or
            what was written is not what was read.
        OSError: the disk did not take it.
    """
    with CheckpointReader(directory) as found:
        has_ahead = found.has_ahead
        _check_attention(found.shape, directory)
    with CheckpointReader(directory, ahead=has_ahead) as source:
        write_torch_dist(target, _pieces(source), _empty(source.shape))
        written = MegatronTensors(target, directory)
        names = [spec.name for spec in written.manifest]
        _compare(target, ((name, source.read(name), written.read(name)) for name in names))
    return len(names)


def _check_attention(shape: Shape, directory: Path) -> None:
    """Megatron has the matrices of its own layer in another order, and apart."""
    if shape.delta is not None:
        raise ModelLoadError(
            f"{directory} is of a model with linear attention, whose distributed checkpoints agentrl neither "
            "reads nor writes; train from the Hugging Face directory."
        )


def _empty(shape: Shape) -> Iterator[str]:
    """The keys that Megatron asks for beside its parameters: states of scales, which weights in fp8 have."""
    layers, experts = len(shape.experts_by_layer), shape.num_experts
    for n in range(layers):
        yield from (f"{_LAYERS}{matrix}._extra_state/shard_{n}_{layers}" for matrix in _MATRICES)
        for number in range(experts):
            place = f"_extra_state/shard_{n}.{number}_{layers}.{experts}"
            yield from (f"{_LAYERS}{_EXPERTS}.{matrix}.{place}" for matrix in _OF_EXPERT)
    for depth in range(shape.ahead):
        layer = f"{_AHEAD}{depth}.transformer_layer."
        own = (f"{_AHEAD}{depth}.eh_proj", *(f"{layer}{matrix}" for matrix in _MATRICES))
        yield from (f"{matrix}._extra_state/shard_0_1" for matrix in own)
        for number in range(experts):
            place = f"_extra_state/shard_{number}_{experts}"
            yield from (f"{layer}{_EXPERTS}.{matrix}.{place}" for matrix in _OF_EXPERT)


def _pieces(source: CheckpointReader) -> Iterator[Chunk]:
    dims, experts = source.shape.dims(1), source.shape.experts_by_layer
    # A tensor with several parameters in it is read once.
    read = lru_cache(1)(source.read)
    for placed in source.shape.rules():
        parameter = placed.rule.join([read(name) for name in placed.hf], dims)
        key, *rows = _key_of(placed, _stored_name(placed, source.shape), apart=len(set(experts)) > 1)
        sizes = (len(experts), source.shape.num_experts)[2 - len(rows) if placed.expert is not None else 0 :]
        shape = (*sizes[: len(rows)], *parameter.shape)
        offset = (*rows, *(0 for _ in parameter.shape))
        yield Chunk(key, shape, offset, parameter[(None,) * len(rows)])


def _key_of(placed: Placed, name: str, *, apart: bool) -> tuple[str, *tuple[int, ...]]:
    """The key of a parameter, and its rows there. name: below the layer. apart: each layer has own keys."""
    if placed.layer is None:
        return (name,)
    if placed.depth is not None and placed.expert is None:
        return (f"{placed.megatron_layer}{name}",)
    if placed.depth is not None and placed.expert is not None:
        return (f"{placed.megatron_layer}{_EXPERTS}.{name}", placed.expert)
    layer, rows = (f"{placed.layer}.", ()) if apart else ("", (placed.layer,))
    if placed.expert is None:
        return (f"{_LAYERS}{layer}{name}", *rows)
    return (f"{_LAYERS}{layer}{_EXPERTS}.{name}", *rows, placed.expert)


def _stored_name(placed: Placed, shape: Shape) -> str:
    """The name below the layer; a norm before experts stands by itself, and so do those of heads."""
    name = placed.rule.megatron
    is_before_experts = placed.layer is not None and shape.has_experts(placed.layer)
    if name == "pre_mlp_layernorm.weight" and is_before_experts:
        return name
    norms = {**_NORMS, **_LATENT_NORMS} if shape.family.is_latent else _NORMS
    return norms.get(name, name)


def _names_of(placed: Placed) -> tuple[str, str]:
    """The other names below the layer that it may have."""
    name = placed.rule.megatron
    return _NORMS.get(name, name), name


def _compare(target: Path, triples: Iterator[tuple[str, Tensor, Tensor]]) -> None:
    for name, read, written in triples:
        if read.dtype != written.dtype or not torch.equal(_bits(read), _bits(written)):
            raise ModelLoadError(f"{target} holds other bits of {name} than its source; try another disk.")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
