"""The memory of Megatron's ranks by part, computed from shapes: nothing is allocated.

Weights, gradients and optimizers are those of the parameters that a rank has, by the rules that load a
checkpoint, with the padding of Megatron's buffers. Experts have buffers and an optimizer of their own, whose
state is shared by the ranks that have the same experts, fewer than the replicas of all else. Rows are
estimated, see `row_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from agentrl.assembly.memory import BF16, FP32, MemoryNeed, Networks
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.families import VALUE_HEAD, Placed
from agentrl.trainer.megatron.model.shape import (
    Shape,
    learning_of,
    num_ahead,
    shape_of,
    tensor_shapes_of,
)
from agentrl.trainer.megatron.row_memory import row_bytes

_ALIGNED, _NCCL_MULTIPLE = 64, 128
"""Elements that Megatron's buffers align a parameter, and the end of a buffer, to."""


class MegatronRanks:
    """The ranks of Megatron's trainer; those that differ in another way than their stage take the same.

    With `offload` only the largest of the networks is counted: the others are in the memory of the CPU.
    """

    def __init__(self, networks: Networks, layout: MegatronConfig, trainer: TrainerConfig) -> None:
        ahead = num_ahead(networks.policy) if trainer.enable_mtp_training else 0
        self._shape = shape_of(networks.policy)._replace(ahead=ahead)
        self._layout, self._trainer = layout, trainer
        self._fixed = [_fixed(each, layout) for each in zip(*self._by_network(networks), strict=True)]

    def at(self, tokens: int) -> MemoryNeed:
        """The rank that takes most. tokens: of its longest row."""
        ranks = (self.of_stage(rank, tokens) for rank in range(self._layout.pipeline_model_parallel_size))
        return max(ranks, key=lambda memory: memory.total)

    def of_stage(self, rank: int, tokens: int) -> MemoryNeed:
        """A pipeline rank, from 0."""
        rows = row_bytes(self._shape, self._layout, tokens, rank, bf16=self._trainer.bf16)
        memory = MemoryNeed(activations=rows.kept, dispatch=rows.dispatched, logits=rows.logits)
        return memory.plus(self._fixed[rank])

    def _by_network(self, networks: Networks) -> Iterator[list[MemoryNeed]]:
        """Of each network what each pipeline rank has."""
        shape, policy = self._shape, networks.policy
        heads = (placed for placed in shape.of_a_critic.rules() if placed.hf == (VALUE_HEAD,))
        learning = {*learning_of(shape, self._trainer), *heads}
        yield self._of_ranks(shape, policy, learning)
        if networks.has_critic:
            yield self._of_ranks(shape.of_a_critic, policy, learning)
        for config in networks.frozen:
            yield self._of_ranks(shape_of(config), config, ())

    def _of_ranks(
        self, shape: Shape, config: PreTrainedConfig, learning: Collection[Placed]
    ) -> list[MemoryNeed]:
        layout, shards = self._layout, list(_shards(shape, config, self._layout))
        return [
            _share(_stages(shape, layout, shards, rank), layout, self._trainer, learning)
            for rank in range(layout.pipeline_model_parallel_size)
        ]


def megatron_memory(
    networks: Networks, layout: MegatronConfig, trainer: TrainerConfig, tokens: int
) -> MemoryNeed:
    """The rank of Megatron's trainer that takes most, see `MegatronRanks`."""
    return MegatronRanks(networks, layout, trainer).at(tokens)


def rank_memory(
    networks: Networks, layout: MegatronConfig, trainer: TrainerConfig, tokens: int, rank: int
) -> MemoryNeed:
    """A pipeline rank, from 0, see `MegatronRanks`."""
    return MegatronRanks(networks, layout, trainer).of_stage(rank, tokens)


def _fixed(networks: Sequence[MemoryNeed], layout: MegatronConfig) -> MemoryNeed:
    """What a rank has of all of its networks."""
    if layout.offload:
        return max(networks, key=lambda memory: memory.total)
    memory = MemoryNeed()
    for each in networks:
        memory = memory.plus(each)
    return memory


class _Shard(NamedTuple):
    """A tensor rank's shard of a parameter.

    numel: its numbers. is_hidden: it is a matrix in a layer. is_separate: it has a buffer of its own.
    """

    placed: Placed
    numel: int
    is_hidden: bool
    is_separate: bool


def _share(
    stages: Iterable[Sequence[_Shard]],
    layout: MegatronConfig,
    trainer: TrainerConfig,
    learning: Collection[Placed],
) -> MemoryNeed:
    """What a pipeline rank has of a network, of which some parameters learn."""
    number = BF16 if trainer.bf16 else FP32
    frozen = elements = optimizer = 0
    for pieces in stages:
        own = [piece for piece in pieces if piece.placed in learning]
        still = [piece for piece in pieces if piece.placed not in learning]
        # What never learns, a router's bias, stays in fp32.
        frozen += sum(piece.numel * (number if piece.placed.rule.learns else FP32) for piece in still)
        # Experts have buffers and an optimizer of their own.
        for is_expert in (False, True):
            kind = [piece for piece in own if (piece.placed.expert is not None) == is_expert]
            sharing = layout.replicas_of(is_expert) if layout.shares_the_optimizer else 1
            size = sum(piece.numel for piece in kind)
            if layout.shares_the_optimizer:
                size = _buffers(kind, sharing)
            elements += size
            optimizer += _state(kind, size, size // sharing, trainer)
    return MemoryNeed(frozen + number * elements, FP32 * elements, optimizer)


def _state(pieces: Iterable[_Shard], size: int, state: int, trainer: TrainerConfig) -> int:
    """Bytes of an optimizer on the device. size, state: numbers of its buffers, and this rank's part of them.

    Which rank has Muon's matrices is not known here: it has one mean of them, and of others two.
    """
    if trainer.optimizer_cpu_offload:
        return 0
    hidden = sum(piece.numel for piece in pieces if piece.is_hidden) if trainer.optimizer == "muon" else 0
    two_means = min(size - hidden, state)
    return (FP32 if trainer.bf16 else 0) * state + FP32 * (state + two_means)


def _buffers(pieces: Iterable[_Shard], sharing: int) -> int:
    """Numbers of the buffers that ranks share, padding included. sharing: those ranks (count)."""
    buckets = [0, 0]
    for piece in pieces:
        buckets[piece.is_separate] += _padded(piece.numel, _ALIGNED)
    return sum(_padded(bucket, math.lcm(sharing, _NCCL_MULTIPLE)) for bucket in buckets)


def _stages(
    shape: Shape, layout: MegatronConfig, shards: Sequence[_Shard], rank: int
) -> Iterator[list[_Shard]]:
    """The parameters of each of a pipeline rank's stages."""
    stages = layout.stages(len(shape.experts_by_layer))
    for stage in range(rank, len(stages), layout.pipeline_model_parallel_size):
        yield [shard for shard in shards if _is_on(shard.placed, stage, stages, tied=shape.tied)]


def _is_on(placed: Placed, stage: int, stages: Sequence[range], *, tied: bool) -> bool:
    """Whether a stage has a parameter. stages: their layers."""
    is_last = stage == len(stages) - 1
    if placed.layer is not None and placed.depth is None:
        return placed.layer in stages[stage]
    if _is_embedding(placed):
        # For a tied head the last stage keeps a copy.
        return stage == 0 or (tied and is_last)
    return is_last


def _is_embedding(placed: Placed) -> bool:
    return placed.rule.megatron.startswith("embedding.")


def _shards(shape: Shape, config: PreTrainedConfig, layout: MegatronConfig) -> Iterator[_Shard]:
    """Every parameter with the elements of one tensor rank's shard, by the rules that load a checkpoint.

    Of the experts, those of the first rank.
    """
    shapes = {**tensor_shapes_of(shape, config), VALUE_HEAD: (1, shape.hidden)}
    own = shape.num_experts // layout.expert_model_parallel_size
    # A tied embedding that two stages have.
    is_on_two = shape.tied and layout.pipeline_model_parallel_size > 1
    for placed in shape.rules():
        if placed.expert is not None and placed.expert >= own:
            continue
        ranks = layout.sharding_ranks(placed.expert)
        parts = [torch.empty(shapes[name], device="meta") for name in placed.hf]
        shard = placed.rule.cut(placed.rule.join(parts, shape.dims(ranks)), ranks)[0]
        is_hidden = shard.ndim == 2 and placed.layer is not None
        yield _Shard(placed, shard.numel(), is_hidden, is_on_two and _is_embedding(placed))


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
