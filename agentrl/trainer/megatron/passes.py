"""Forward and backward passes of rows through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from agentrl.losses import LossOutput, TokenOutputs
from agentrl.trainer.attention import Ends
from agentrl.trainer.batch import MicroBatch
from agentrl.trainer.megatron.arguments import Target, chosen
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.device import compute_device
from agentrl.trainer.megatron.model.ahead import AheadLoss
from agentrl.trainer.megatron.model.layers import PackedRow, Rotation
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.outputs import OutputFunction, ahead_sum, logprobs_of, on_device
from agentrl.trainer.megatron.model.rows import Cut, RowShard, padded, shard_of
from agentrl.trainer.routing import (
    NO_LOSSES,
    PassRouting,
    RankTokens,
    RouterFacts,
    RouterLosses,
    RouterReplay,
)

RowLoss = Callable[[MicroBatch, TokenOutputs], LossOutput]
"""The weighted sum over all predicted tokens of a row, and its metrics."""


@dataclass(eq=False)
class Passes:
    """A network whose gradients are summed over all replicas and context ranks, never averaged.

    outputs: logprobs or values of a row. learns: whether it has buffers for gradients.
    """

    network: Network
    outputs: OutputFunction = logprobs_of
    learns: bool = True

    def __post_init__(self) -> None:
        config = self.network.config
        self._rotations = {
            layer.rotary: Rotation(layer.rotary, pairs=config.rotary_interleaved)
            for layer in self.network.shape.attention_by_layer
        }
        self.stages: list[DistributedDataParallel] = list(self.network.stages)
        if not self.learns:
            return
        ddp = _replicas_of(self.network.layout)
        self.stages = [
            DistributedDataParallel(config, ddp, stage, disable_bucketing=number > 0)
            for number, stage in enumerate(self.stages)
        ]
        for stage in self.stages:
            if stage.use_forward_hook:
                _arrive_by_layer(stage)
        config.finalize_model_grads_func = _sum_gradients
        if ddp.overlap_grad_reduce:
            silent = [stage.no_sync for stage in self.stages]
            config.no_sync_func = silent if len(silent) > 1 else silent[0]

    def learn(
        self,
        rows: Sequence[MicroBatch],
        loss: RowLoss,
        routing: PassRouting | None = None,
        ahead: AheadLoss | None = None,
    ) -> list[Mapping[str, Tensor]]:
        """Accumulate the gradient of the sum of all losses in the parameters' main_grad.

        All ranks call it, each replica with its own rows (at least one). routing: see `routing`. ahead: of
        layers that predict further ahead, where there are some: they learn, too.

        Returns:
            on the last stage the metrics of its rows (the same on all tensor and context ranks), elsewhere
            nothing.
        """
        for stage in self.stages:
            stage.zero_grad_buffer()
        if ahead is not None:
            self.gather()
        with nullcontext() if ahead is None else self.network.fetched_embedding():
            return self._run(rows, self._step(loss, routing, ahead), forward_only=False)

    @torch.no_grad()
    def forward(
        self, rows: Sequence[MicroBatch], routing: PassRouting | None = None
    ) -> list[tuple[MicroBatch, TokenOutputs]]:
        """The outputs at the predicted tokens; on the last stage, elsewhere nothing."""
        outputs_by_row: list[tuple[MicroBatch, TokenOutputs]] = []

        def collect(row: MicroBatch, outputs: TokenOutputs) -> LossOutput:
            outputs_by_row.append((row, outputs))
            return LossOutput(outputs.logp_N.sum(), {})

        self._run(rows, self._step(collect, routing), forward_only=True)
        # Also of layers that only learn: nothing is under way where the memory may be freed.
        self.gather()
        return outputs_by_row

    def gather(self) -> None:
        """Have all weights of the last step; every rank calls it before they are read outside of a pass.

        A pass gathers them by itself, layer by layer, see `overlap_param_gather`.
        """
        groups = gathered_groups(self.stages) if self.learns else []
        for group in groups:
            if not group.param_gather_dispatched:
                group.start_param_sync()
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    def readable_stages(self) -> Sequence[nn.Module]:
        """The stages for whoever reads their weights; every rank calls it."""
        self.gather()
        return self.network.stages

    def routing(
        self,
        replay: RouterReplay | None = None,
        *,
        records: bool = False,
        losses: RouterLosses = NO_LOSSES,
    ) -> PassRouting | None:
        """What routers ask in a pass, see `PassRouting`; None = the model has no experts."""
        shape = self.network.shape
        if not shape.num_experts:
            return None
        is_sigmoid = self.network.config.moe_router_score_function == "sigmoid"
        facts = RouterFacts(shape.expert_layers, shape.num_experts, compute_device(), is_sigmoid, _total)
        return PassRouting(facts, replay, records=records, losses=losses)

    def tensors(self) -> Iterator[Tensor]:
        """Its parameters."""
        for stage in self.stages:
            yield from stage.parameters()

    def gradients(self) -> Iterator[Tensor]:
        """The buffers of their gradients, which `learn` overwrites."""
        for stage in self.stages if self.learns else ():
            for buffer in (*stage.buffers, *stage.expert_parallel_buffers):
                yield buffer.grad_data

    def _run(
        self,
        rows: Sequence[MicroBatch],
        step: Callable[[Iterator[RowShard], nn.Module], tuple[Tensor, object]],
        *,
        forward_only: bool,
    ) -> list[Mapping[str, Tensor]]:
        rows = self._in_step(rows)
        cut = self._cut(rows)
        shards = [shard_of(row, cut) for row in rows]
        iterators = [iter(shards) for _ in self.stages]
        metrics: list[Mapping[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.stages if len(self.stages) > 1 else self.stages[0],
            num_microbatches=len(shards),
            seq_length=cut.min_tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return metrics

    def _in_step(self, rows: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """As many rows as the other replicas have that this one exchanges tokens with, in every pass."""
        group = parallel_state.get_expert_tensor_and_model_parallel_group()
        if self.network.shape.num_experts == 0 or group.size() == 1:
            return rows
        most = torch.tensor([len(rows)], device=compute_device())
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return padded(rows, int(most.item()))

    def _cut(self, rows: Sequence[MicroBatch]) -> Cut:
        layout = self.network.layout
        cut = Cut(
            layout.sequence_multiple,
            layout.row_multiple,
            layout.context_parallel_size,
            parallel_state.get_context_parallel_rank(),
            ahead=self.network.shape.ahead,
        )
        if layout.num_virtual_stages_per_pipeline_rank == 1:
            return cut
        # Virtual stages need one shape for all rows (see `transformer_config`).
        return cut._replace(min_tokens=max(cut.padded_length(row) for row in rows))

    def _own_tokens(self, row: RowShard) -> RankTokens:
        """The tokens of a row that this rank has between the matrices."""
        index_t = row.index_t
        if self.network.config.sequence_parallel:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            index_t = np.split(index_t, ranks)[parallel_state.get_tensor_model_parallel_rank()]
        return RankTokens(index_t)

    def _step(
        self, loss: RowLoss, routing: PassRouting | None, ahead: AheadLoss | None = None
    ) -> Callable[[Iterator[RowShard], nn.Module], tuple[Tensor, object]]:
        def step(shards: Iterator[RowShard], stage: nn.Module) -> tuple[Tensor, object]:
            row = next(shards)
            positions_t = on_device(row.position_ids_t)
            ends = Ends.of(row.lengths, compute_device())
            routed = None if routing is None else routing.row(row.micro_batch, self._own_tokens(row))
            rotations = {rotary: turn.of(positions_t) for rotary, turn in self._rotations.items()}
            packed = PackedRow(ends, rotations, routed).params()
            states: Tensor = stage(
                on_device(row.input_ids_t)[None],
                positions_t[None],
                None,
                packed_seq_params=packed,
            )

            def row_loss(last: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
                output = loss(row.micro_batch, self.outputs(self.network, row, last))
                total, metrics = output.sum, output.metrics
                if ahead is not None:
                    term = ahead_sum(self.network, row, last, packed, ahead.by_depth)
                    total = total + ahead.factor * term
                    metrics = {**metrics, "mtp_loss": _of_context(term.detach().clone())}
                return total, torch.tensor(1, dtype=torch.int), metrics

            return states, row_loss

        return step


def _replicas_of(layout: MegatronConfig) -> DistributedDataParallelConfig:
    # While the last row goes back through the first layers, gradients of the last ones are summed.
    several = layout.data_parallel_size * layout.context_parallel_size > 1
    fields = {"overlap_grad_reduce": several, **chosen(layout, Target.REPLICAS)}
    # While a row goes through the first layers, weights of the next ones arrive. A CPU gains nothing; layers
    # of a provider may read weights before their module is called.
    arrive = layout.shares_the_optimizer and layout.custom_model_provider_path is None
    arrive = arrive and bool(fields["overlap_grad_reduce"]) and compute_device().type != "cpu"
    fields = {"overlap_param_gather": arrive, **fields}
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=layout.shares_the_optimizer, **fields
    )


def gathered_groups(stages: Sequence[DistributedDataParallel]) -> list[_ParamAndGradBucketGroup]:
    """The groups of parameters that passes gather, those of a stage in the order of its layers."""
    of_stages = [
        (stage.bucket_groups, stage.expert_parallel_bucket_groups)
        for stage in stages
        if stage.use_forward_hook
    ]
    return [group for both in of_stages for groups in both for group in reversed(groups)]


def _arrive_by_layer(stage: DistributedDataParallel) -> None:
    """Have all weights of a layer when it is called: it may read some of modules that it does not call.

    Megatron waits for those of a module where that is called.
    """
    group_of = stage.param_to_bucket_group
    for layer in (module for module in stage.modules() if isinstance(module, TransformerLayer)):
        groups = dict.fromkeys(group_of[p] for p in layer.parameters() if p in group_of)
        layer.register_forward_pre_hook(partial(_arrive, [*groups]))


def _arrive(groups: Sequence[_ParamAndGradBucketGroup], *_: object) -> None:
    for group in groups:
        group.finish_param_sync()


def _of_context(own: Tensor) -> Tensor:
    """The sum over the ranks that share sequences."""
    group = parallel_state.get_context_parallel_group()
    if group.size() > 1:
        dist.all_reduce(own, group=group)
    return own


def _total(own: Tensor) -> Tensor:
    """The sum over the ranks that have tokens of the same rows."""
    group = parallel_state.get_tensor_and_context_parallel_group()
    if group.size() > 1:
        dist.all_reduce(own, group=group)
    return own


def _sum_gradients(stages: list[nn.Module], _num_tokens: Tensor | None = None, **kwargs: object) -> None:
    """Megatron's own reductions, without its division by a number of tokens."""
    finalize_model_grads(stages, None, **kwargs)
