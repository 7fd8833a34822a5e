"""Rows through the pipeline, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from agentrl.losses import LossOutput, TokenOutputs
from agentrl.trainer.batch import MicroBatch
from agentrl.trainer.megatron.device import here
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.outputs import Ask, logprobs_of, on_device
from agentrl.trainer.megatron.model.rows import Cut, Row, row_of

RowLoss = Callable[[MicroBatch, TokenOutputs], LossOutput]
"""The weighted sum over all predicted tokens of a row, and its metrics."""


@dataclass(eq=False)
class Passes:
    """A network whose gradients are added up over all replicas and context ranks, never averaged.

    ask: what the network says of a row. learns: without, it has no room for gradients.
    """

    network: Network
    ask: Ask = logprobs_of
    learns: bool = True

    def __post_init__(self) -> None:
        config = self.network.config
        self.stages: list[DistributedDataParallel] = list(self.network.stages)
        if not self.learns:
            return
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=self.network.layout.shares_the_optimizer,
        )
        self.stages = [
            DistributedDataParallel(config, ddp, stage, disable_bucketing=number > 0)
            for number, stage in enumerate(self.stages)
        ]
        config.finalize_model_grads_func = _added_up

    def learn(self, rows: Sequence[MicroBatch], loss: RowLoss) -> list[Mapping[str, Tensor]]:
        """Leave the gradient of the sum of all losses in the parameters' main_grad.

        All ranks call it, each replica with its own rows (at least one).

        Returns:
            on the last stage the metrics of its rows (the same on all tensor and context ranks), elsewhere
            nothing.
        """
        for stage in self.stages:
            stage.zero_grad_buffer()
        return self._through(rows, loss, forward_only=False)

    @torch.no_grad()
    def look(self, rows: Sequence[MicroBatch]) -> list[tuple[MicroBatch, TokenOutputs]]:
        """What the model says of the predicted tokens; on the last stage, elsewhere nothing."""
        seen: list[tuple[MicroBatch, TokenOutputs]] = []

        def remember(row: MicroBatch, outputs: TokenOutputs) -> LossOutput:
            seen.append((row, outputs))
            return LossOutput(outputs.logp_N.sum(), {})

        self._through(rows, remember, forward_only=True)
        return seen

    def tensors(self) -> Iterator[Tensor]:
        """Its parameters."""
        for stage in self.stages:
            yield from stage.parameters()

    def gradients(self) -> Iterator[Tensor]:
        """The room for their gradients, which `learn` fills anew."""
        for stage in self.stages if self.learns else ():
            for buffer in (*stage.buffers, *stage.expert_parallel_buffers):
                yield buffer.grad_data

    def _through(
        self, rows: Sequence[MicroBatch], loss: RowLoss, *, forward_only: bool
    ) -> list[Mapping[str, Tensor]]:
        cut = self._cut(rows)
        packed = [row_of(row, cut) for row in rows]
        iterators = [iter(packed) for _ in self.stages]
        found: list[Mapping[str, Tensor]] = get_forward_backward_func()(
            forward_step_func=self._step(loss),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.stages if len(self.stages) > 1 else self.stages[0],
            num_microbatches=len(packed),
            seq_length=cut.least,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return found

    def _cut(self, rows: Sequence[MicroBatch]) -> Cut:
        layout = self.network.layout
        cut = Cut(
            layout.sequence_multiple,
            layout.row_multiple,
            layout.context_parallel_size,
            parallel_state.get_context_parallel_rank(),
        )
        if layout.num_virtual_stages_per_pipeline_rank == 1:
            return cut
        # There Megatron knows one shape for all rows (see `transformer_config`).
        return cut._replace(least=max(cut.filled(row) for row in rows))

    def _step(self, loss: RowLoss) -> Callable[[Iterator[Row], nn.Module], tuple[Tensor, object]]:
        def step(rows: Iterator[Row], stage: nn.Module) -> tuple[Tensor, object]:
            row = next(rows)
            states: Tensor = stage(
                on_device(row.input_ids_t)[None],
                on_device(row.position_ids_t)[None],
                None,
                packed_seq_params=_packed(row),
            )

            def weighed(last: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
                found = loss(row.whole, self.ask(self.network, row, last))
                return found.sum, torch.tensor(1, dtype=torch.int), found.metrics

            return states, weighed

        return step


def _packed(row: Row) -> PackedSeqParams:
    bounds = torch.tensor(row.bounds, dtype=torch.int32, device=here())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=row.longest,
        max_seqlen_kv=row.longest,
    )
    # Every layer wants them on the CPU, and would wait for the GPU to get them.
    packed.bounds = row.bounds
    return packed


def _added_up(stages: list[nn.Module], _num_tokens: Tensor | None = None, **how: object) -> None:
    """Megatron's own reductions, without its division by a number of tokens."""
    finalize_model_grads(stages, None, **how)
