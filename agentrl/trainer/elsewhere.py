"""A network's state that another layout, or another trainer, has saved: unsharded, by Hugging Face's names.

Values and means are moved, never rounded: a state that goes to another layout and back has the same bits.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from agentrl.errors import ModelLoadError
from agentrl.trainer.megatron.files.names import MAIN, file_of, rank_file, tensor_folder
from agentrl.trainer.megatron.model.families import VALUE_HEAD, Placed
from agentrl.trainer.megatron.model.rules import Run
from agentrl.trainer.megatron.model.shape import Shape, shape_of
from agentrl.trainer.summary import FOLDERS, RankLayout, SavedTrainer
from agentrl.types import ScoreRole
from agentrl.weights.hf.opening import open_tensors, specs_in
from agentrl.weights.hf.tensors import tensor_shapes

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's means, by torch's names."""
MOMENTUM = "momentum_buffer"
"""Muon's mean, by torch's name."""
TORCH_FILE = "state.pt"

_DAMAGED = (
    *(OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError),
    pickle.UnpicklingError,
)
_HEAD = "lm_head.weight"
"""A critic's head has this name in the torch trainer."""


class Unsharded(Protocol):
    """A saved network, tensor by tensor."""

    def value(self, name: str) -> Tensor:
        """A tensor by its Hugging Face name; fp32 where it was trained so.

        Raises:
            ModelLoadError: the files lack it.
        """

    def moment(self, name: str, kind: str) -> Tensor:
        """A mean of a tensor, fp32. kind: one of MOMENTS, or MOMENTUM where Muon optimizes it.

        Raises:
            ModelLoadError: the files lack it.
        """


def saved_elsewhere(
    folder: Path, role: ScoreRole, saved: SavedTrainer, config: PreTrainedConfig
) -> Unsharded:
    """The network of a role in a saved state. config: the policy's.

    Raises:
        ModelLoadError: the state is of a model whose state stays with its trainer.
    """
    shape, shapes = shape_of(config), tensor_shapes(config)
    if role == "values":
        shape = shape.of_a_critic
        shapes = {**shapes, VALUE_HEAD: (1, int(shape.sizes["hidden_size"]))}
    place = folder / FOLDERS[role]
    if saved.is_of_torch:
        return _TorchFile(place / TORCH_FILE)
    return _RankFiles(place, shape, shapes, saved.ranks)


class _TorchFile:
    """What the torch trainer saves; see `LearnerState`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            state = torch.load(path, weights_only=True, mmap=True)
            self._network: Mapping[str, Tensor] = state["network"]
            self._means: dict[str, Mapping[str, Tensor]] = {
                name: optimizer["state"][number]
                for names, optimizer in zip(state["parameters"], state["optimizers"], strict=True)
                for number, name in enumerate(names)
                if number in optimizer["state"]
            }
        except _DAMAGED as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelLoadError(f"{path} is not what the torch trainer saves: {reason}") from error

    def value(self, name: str) -> Tensor:
        """That of the network."""
        return self._found(self._network, name)

    def moment(self, name: str, kind: str) -> Tensor:
        """That of the optimizer."""
        means = self._means.get(_HEAD if name == VALUE_HEAD else name, {})
        return self._found({name: means[kind]} if kind in means else {}, name)

    def _found(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        tensor = tensors.get(name, tensors.get(_HEAD if name == VALUE_HEAD else name))
        if tensor is None:
            raise ModelLoadError(f"{self._path} lacks {name}; it is of another model, or of adapters.")
        return tensor


class _RankFiles:
    """What Megatron's ranks save; see `agentrl.trainer.megatron.files.saving`.

    shapes: of the Hugging Face tensors. layout: of the ranks that have saved it.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        shapes: Mapping[str, Sequence[int]],
        layout: RankLayout,
    ) -> None:
        self._folder, self._shape, self._shapes = folder, shape, shapes
        self._tensor_ranks = layout.tensor_model_parallel_size
        self._replicas = layout.data_parallel_size * layout.context_parallel_size
        self._num_ranks = self._tensor_ranks * self._replicas * layout.pipeline_model_parallel_size
        self._placed = {name: placed for placed in shape.rules() for name in placed.hf}
        # Queries, keys and values are one parameter: it is put together once.
        self._tensors = lru_cache(2)(self._unsharded)

    def value(self, name: str) -> Tensor:
        """The copy in fp32, where the optimizer has one; otherwise the parameter itself."""
        return self._tensor(name, MAIN)

    def moment(self, name: str, kind: str) -> Tensor:
        """That of the optimizer."""
        return self._tensor(name, kind)

    def _tensor(self, name: str, kind: str) -> Tensor:
        if name == _HEAD and self._shape.critic:
            name = VALUE_HEAD
        elif name == _HEAD and self._shape.tied:
            name = next(self._shape.rules()).hf[0]
        placed = self._placed.get(name)
        if placed is None:
            raise ModelLoadError(f"{self._folder} lacks {name}; it is of another model.")
        return self._tensors(placed, kind)[placed.hf.index(name)]

    def _unsharded(self, placed: Placed, kind: str) -> list[Tensor]:
        ranks = self._tensor_ranks
        shards = [self._shard(placed, rank, kind) for rank in range(ranks if placed.rule.is_cut else 1)]
        tensors = [torch.empty(*self._shapes[name], dtype=shards[0].dtype) for name in placed.hf]
        for rank, shard in enumerate(shards):
            placed.rule.unshard(shard, Run(rank, ranks), tensors, self._shape.dims(ranks))
        return tensors

    def _shard(self, placed: Placed, rank: int, kind: str) -> Tensor:
        """A tensor rank's shard of values (MAIN) or means."""
        path = tensor_folder(self._folder, rank) / file_of(placed)
        with open_tensors(path) as opened:
            if placed.megatron not in specs_in(opened):
                raise ModelLoadError(f"{path} lacks {placed.megatron}; it is of another model.")
            shape = opened.get_slice(placed.megatron).get_shape()
            parts = self._parts(f"{placed.megatron}.{kind}", rank)
            if kind == MAIN and not parts:
                shard: Tensor = opened.get_tensor(placed.megatron)
                return shard
        if sum(map(len, parts)) != torch.Size(shape).numel():
            raise ModelLoadError(f"{self._folder} lacks a part of {placed.megatron}.{kind}; copy it again.")
        return torch.cat(parts).view(shape)

    def _parts(self, name: str, rank: int) -> list[Tensor]:
        """The parts of a tensor rank's shard, in the order of the replicas, which share its optimizer.

        A tied embedding has another copy in the last stage: that of the first one is read.
        """
        owners = [owner for owner in self._owners.get(name, ()) if owner % self._tensor_ranks == rank]
        stage_size = self._tensor_ranks * self._replicas
        first = [owner for owner in owners if owner // stage_size == owners[0] // stage_size]
        parts = []
        for owner in first:
            with open_tensors(rank_file(self._folder, owner)) as opened:
                parts.append(opened.get_tensor(name))
        return parts

    @cached_property
    def _owners(self) -> dict[str, list[int]]:
        """The ranks that have a part of each tensor of the optimizer, in order."""
        owners: dict[str, list[int]] = {}
        for rank in range(self._num_ranks):
            path = rank_file(self._folder, rank)
            if path.exists():
                with open_tensors(path) as opened:
                    for name in specs_in(opened):
                        owners.setdefault(name, []).append(rank)
        return owners
