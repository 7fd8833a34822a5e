"""A network's state that another layout, or another trainer, has saved: unsharded, by Hugging Face's names.

Values and means are moved, never rounded: a state that goes to another layout and back has the same bits.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from agentrl.errors import ModelLoadError
from agentrl.trainer.megatron.files.names import MAIN, rank_file, shard_file
from agentrl.trainer.megatron.model.families import VALUE_HEAD, Placed
from agentrl.trainer.megatron.model.rules import Run, unshard
from agentrl.trainer.megatron.model.shape import Shape, shape_of, tensor_shapes_of
from agentrl.trainer.summary import FOLDERS, RankLayout, SavedTrainer
from agentrl.types import ScoreRole
from agentrl.weights.codec import in_parts, names_in_checkpoints, of_parts
from agentrl.weights.hf.opening import open_tensors, specs_in
from agentrl.weights.hf.tensors import meta_model

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
    folder: Path, role: ScoreRole, saved: SavedTrainer, config: PreTrainedConfig, ahead: int = 0
) -> Unsharded:
    """The network of a role in a saved state. config: the policy's. ahead: its layers that predict further
    ahead, where they learn.

    Raises:
        ModelLoadError: the state is of a model whose state stays with its trainer.
    """
    shape, model = shape_of(config)._replace(ahead=ahead), meta_model(config)
    shapes = tensor_shapes_of(shape, config)
    if role == "values":
        shape = shape.of_a_critic
        shapes = {**shapes, VALUE_HEAD: (1, int(shape.sizes["hidden_size"]))}
    place = folder / FOLDERS[role]
    if saved.is_of_torch:
        return _TorchFile(place / TORCH_FILE, model)
    return _ByEitherName(_RankFiles(place, shape, shapes, saved.ranks), model)


class _ByEitherName:
    """A saved network whose tensors are also found by a model's own names for several of them, as experts."""

    def __init__(self, saved: Unsharded, model: PreTrainedModel) -> None:
        self._saved, self._model = saved, model
        self._parts = names_in_checkpoints(model, dict(model.named_parameters()))

    def value(self, name: str) -> Tensor:
        """The tensor, or that of its parts."""
        return self._found(name, self._saved.value)

    def moment(self, name: str, kind: str) -> Tensor:
        """The tensor, or that of its parts."""
        return self._found(name, partial(self._saved.moment, kind=kind))

    def _found(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        if name not in self._parts:
            return read(name)
        return of_parts(self._model, name, {part: read(part) for part in self._parts[name]})


class _TorchFile:
    """What the torch trainer saves; see `LearnerState`. model: whose tensors they are, without memory."""

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        self._path, self._model = path, model
        names = names_in_checkpoints(model, dict(model.named_parameters()))
        self._own_names = {part: own for own, parts in names.items() for part in parts}
        # The parts of one tensor are asked for one after the other.
        self._in_parts = lru_cache(4)(self._converted)
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
        own = self._own_names.get(name)
        return self._found(self._network, name) if own is None else self._in_parts(own, None)[name]

    def moment(self, name: str, kind: str) -> Tensor:
        """That of the optimizer."""
        own = self._own_names.get(name)
        return self._mean(name, kind) if own is None else self._in_parts(own, kind)[name]

    def _converted(self, own: str, kind: str | None) -> dict[str, Tensor]:
        """A tensor's parts, as a checkpoint has them. kind: of its means; None = its value."""
        whole = self._found(self._network, own) if kind is None else self._mean(own, kind)
        return in_parts(self._model, own, whole)

    def _mean(self, name: str, kind: str) -> Tensor:
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
        self._layout = layout
        replicas = layout.data_parallel_size * layout.context_parallel_size
        self._stage_size = layout.tensor_model_parallel_size * replicas
        self._num_ranks = self._stage_size * layout.pipeline_model_parallel_size
        self._placed = {name: tuple(every) for name, every in shape.by_tensor().items()}
        # Queries, keys and values are one parameter: it is put together once. So are tensors of all experts,
        # of which value and means are asked for by turns.
        self._tensors = lru_cache(3)(self._unsharded)

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
        return self._tensors(placed, kind)[placed[0].hf.index(name)]

    def _unsharded(self, every: tuple[Placed, ...], kind: str) -> list[Tensor]:
        """The tensors that some parameters make, each of them a part of all."""
        layout, tensors = self._layout, list[Tensor]()
        for placed in every:
            ranks = layout.tensor_model_parallel_size if placed.expert is None else layout.expert_tensor_ranks
            for rank in range(ranks if placed.rule.is_cut else 1):
                shard = self._shard(placed, rank, kind)
                shapes = [self._shapes[name] for name in placed.hf]
                tensors = tensors or [torch.empty(*shape, dtype=shard.dtype) for shape in shapes]
                unshard(placed.rule, shard, Run(rank, ranks), tensors, self._shape.dims(ranks))
        return tensors

    def _shard(self, placed: Placed, rank: int, kind: str) -> Tensor:
        """A tensor rank's shard of values (MAIN) or means."""
        holders = self._layout.tensor_model_parallel_size
        if placed.expert is not None:
            # The number of a rank among those that hold a layer's experts has the tensor rank first.
            holders = self._layout.expert_model_parallel_size * self._layout.expert_tensor_ranks
            own = self._shape.num_experts // self._layout.expert_model_parallel_size
            rank += placed.expert // own * self._layout.expert_tensor_ranks
        path = shard_file(self._folder, placed, rank)
        with open_tensors(path) as opened:
            if placed.megatron not in specs_in(opened):
                raise ModelLoadError(f"{path} lacks {placed.megatron}; it is of another model.")
            shape = opened.get_slice(placed.megatron).get_shape()
            parts = self._parts(f"{placed.megatron}.{kind}", rank, holders)
            if kind == MAIN and not parts:
                shard: Tensor = opened.get_tensor(placed.megatron)
                return shard
        if sum(map(len, parts)) != torch.Size(shape).numel():
            raise ModelLoadError(f"{self._folder} lacks a part of {placed.megatron}.{kind}; copy it again.")
        return torch.cat(parts).view(shape)

    def _parts(self, name: str, rank: int, holders: int) -> list[Tensor]:
        """The parts of a shard, in the order of the replicas, which share its optimizer.

        rank: the one that has the shard, of the `holders` that have a parameter together. A tied embedding
        has another copy in the last stage: that of the first one is read.
        """
        owners = [owner for owner in self._owners.get(name, ()) if owner % holders == rank]
        size = self._stage_size
        first = [owner for owner in owners if owner // size == owners[0] // size]
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
