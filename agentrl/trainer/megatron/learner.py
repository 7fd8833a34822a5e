"""A network that learns, on this rank: one step over a batch, however it is distributed over replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from megatron.core import parallel_state
from torch import Tensor

from agentrl.losses import LossOutput, TokenOutputs
from agentrl.trainer.batch import MicroBatch
from agentrl.trainer.loss_inputs import StepInputs
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.outputs import OutputFunction
from agentrl.trainer.megatron.optimizer import MegatronOptimizer
from agentrl.trainer.megatron.passes import Passes
from agentrl.trainer.plan import Learning, StepSums, is_without_gradient
from agentrl.types import TrainBatch


class MegatronLearner:
    """Trains `network` in place. outputs: logprobs or values of a row."""

    def __init__(self, network: Network, outputs: OutputFunction, learning: Learning) -> None:
        self._loss, self._bf16 = learning.loss, learning.config.bf16
        self.passes = Passes(network, outputs)
        self.optimizer = MegatronOptimizer(
            network, self.passes.stages, learning.config, total_steps=learning.total_steps
        )

    def learn(self, rows: Sequence[MicroBatch], batch: TrainBatch) -> StepSums:
        """One optimizer step over the batch, of which `rows` are this replica's."""
        inputs = StepInputs(batch, bf16=self._bf16)
        sums = self.backward(rows, inputs)
        step, is_left_out = self.optimizer.step(partial(is_without_gradient, batch))
        logprobs = inputs.logprobs() if is_reporting_rank() else {}
        return StepSums(sums, step, logprobs, is_left_out)

    def backward(self, rows: Sequence[MicroBatch], inputs: StepInputs) -> Mapping[str, float]:
        """Accumulate the gradient of the batch; sums of loss and metrics on the reporting ranks."""

        def loss(row: MicroBatch, outputs: TokenOutputs) -> LossOutput:
            output = self._loss(outputs, inputs.of(row, outputs))
            return LossOutput(output.sum, {"loss": output.sum.detach(), **output.metrics})

        reports = self.passes.learn(rows, loss)
        return _summed(reports) if is_reporting_rank() else {}

    def optimizer_tensors(self) -> Iterator[Tensor]:
        """The optimizer's state between two steps; parts of it may share memory with the parameters."""
        for part in self.optimizer.parts():
            yield part.main
            yield from part.moments.values()


def is_reporting_rank() -> bool:
    """Whether this rank reports, of all ranks that compute the same outputs."""
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    return place == (last, 0, 0)


def _summed(reports: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    return {
        name: float(torch.stack([report[name] for report in reports]).double().sum()) for name in reports[0]
    }
