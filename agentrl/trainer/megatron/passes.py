"""Rows through the pipeline, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from agentrl.losses import LossOutput, TokenOutputs
from agentrl.trainer.megatron.device import here
from agentrl.trainer.megatron.network import Network
from agentrl.trainer.megatron.rows import Cut, Row, row_of
from agentrl.trainer.megatron.vocabulary import parallel_logprobs
from agentrl.trainer.torch.batch import MicroBatch

RowLoss = Callable[[MicroBatch, TokenOutputs], LossOutput]
"""The weighted sum over all predicted tokens of a row, and its metrics."""


@dataclass(eq=False)
class Passes:
    """A network whose gradients are added up over all replicas and context ranks, never averaged.

    learns: without, it has no room for gradients.
    """

    network: Network
    entropy_gradient: bool = False
    learns: bool = True

    def __post_init__(self) -> None:
        config = self.network.config
        self.stages: list[DistributedDataParallel] = list(self.network.stages)
        if not self.learns:
            return
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
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
                _tensor(row.input_ids_t)[None],
                _tensor(row.position_ids_t)[None],
                None,
                packed_seq_params=_packed(row),
            )

            def weighed(last: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
                found = loss(row.whole, self._outputs(row, last))
                return found.sum, torch.tensor(1, dtype=torch.int), found.metrics

            return states, weighed

        return step

    def _outputs(self, row: Row, states: Tensor) -> TokenOutputs:
        """From the last stage's states, [1, t, hidden] or, spread over tensor ranks, a part of them."""
        hidden = states[0]
        if self.network.layout.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        micro = row.whole
        here = parallel_logprobs(
            hidden.index_select(0, _tensor(row.predictor_n)),
            self.network.head,
            _tensor(micro.targets_N[row.chosen_n]),
            _tensor(micro.temperature_N[row.chosen_n]),
            entropy_gradient=self.entropy_gradient,
        )
        if self.network.layout.context_parallel_size == 1:
            return here
        places, count = _tensor(row.chosen_n), len(micro.targets_N)
        return TokenOutputs(
            _of_all_ranks(here.logp_N, places, count), _of_all_ranks(here.entropy_N, places, count)
        )


def _of_all_ranks(values_n: Tensor, places_n: Tensor, count: int) -> Tensor:
    """[N]: the values of all context ranks, each at its place; a gradient goes back to whose value it is."""
    mine_N = values_n.new_zeros(count).index_copy(0, places_n, values_n)
    all_N: Tensor = reduce_from_tensor_model_parallel_region(
        mine_N, group=parallel_state.get_context_parallel_group()
    )
    return all_N


def _tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(array).to(here())


def _packed(row: Row) -> PackedSeqParams:
    bounds = torch.tensor(row.bounds, dtype=torch.int32, device=here())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=row.longest,
        max_seqlen_kv=row.longest,
    )


def _added_up(stages: list[nn.Module], _num_tokens: Tensor | None = None, **how: object) -> None:
    """Megatron's own reductions, without its division by a number of tokens."""
    finalize_model_grads(stages, None, **how)
