"""What one rank does for the trainer: the same calls on every rank, each with the same arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from agentrl.losses import LossOutput, TokenOutputs
from agentrl.protocols import Bucket
from agentrl.trainer.megatron.checkpoint import Checkpoint
from agentrl.trainer.megatron.gather import gathered
from agentrl.trainer.megatron.network import Network
from agentrl.trainer.megatron.optimizer import Optimizer
from agentrl.trainer.megatron.passes import Passes
from agentrl.trainer.megatron.plan import Plan, Told
from agentrl.trainer.megatron.rows import shared_out
from agentrl.trainer.torch.batch import MicroBatch, micro_batches
from agentrl.trainer.torch.learner import loss_inputs
from agentrl.types import FloatArray, Sample, ScoreRole, TrainBatch
from agentrl.weights import pack_buckets

BUCKET_BYTES = 64 << 20


class Worker:
    """One rank of the trainer; the parallel state must be up."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        bonus = bool(getattr(plan.loss, "entropy_coef", 0.0))
        self._policy = Passes(_network(plan, "old"), entropy_gradient=bonus)
        self._frozen = {
            role: Passes(_network(plan, role), learns=False) for role in plan.models if role != "old"
        }
        self._optimizer = Optimizer(self._policy.stages, plan.config, total_steps=plan.total_steps)

    def score(self, samples: Sequence[Sample], role: ScoreRole) -> dict[int, FloatArray]:
        """Logprobs of every token but the first, by sample: those that this rank is the one to tell."""
        passes = self._policy if role == "old" else self._frozen[role]
        seen = passes.look(self._rows(samples, whole=True))
        found: dict[int, FloatArray] = {}
        for row, outputs in seen if _tells() else []:
            ends = np.cumsum([len(at) for at in row.positions])
            parts = np.split(outputs.logp_N.float().cpu().numpy(), ends[:-1])
            found |= {m: part for m, part in zip(row.members, parts, strict=True) if len(part)}
        return found

    def update(self, batch: TrainBatch) -> Told:
        """One optimizer step over the whole batch."""

        def loss(row: MicroBatch, outputs: TokenOutputs) -> LossOutput:
            found = self._plan.loss(outputs, loss_inputs(row, batch, outputs.logp_N.device))
            return LossOutput(found.sum, {"loss": found.sum.detach(), **found.metrics})

        told = self._policy.learn(self._rows(batch.samples), loss)
        return Told(_summed(told) if _tells() else {}, self._optimizer.step())

    def weights(self) -> Iterator[Bucket]:
        """The policy's weights, in buckets; rank 0 alone has any, and all must come along."""
        yield from pack_buckets(gathered(self._policy.network), BUCKET_BYTES)

    def _rows(self, samples: Sequence[Sample], *, whole: bool = False) -> tuple[MicroBatch, ...]:
        masks = [np.arange(len(s)) > 0 if whole else s.loss_mask for s in samples]
        rows = micro_batches(samples, masks, self._plan.config.max_tokens_per_gpu)
        layout = self._plan.layout
        shares = shared_out(rows, layout.data_parallel_size, count_multiple=layout.row_count_multiple)
        rank: int = parallel_state.get_data_parallel_rank()
        return shares[rank]


def _network(plan: Plan, role: ScoreRole) -> Network:
    with Checkpoint(plan.models[role]) as checkpoint:
        network = Network(checkpoint.shape, plan.layout, bf16=plan.config.bf16)
        network.load(checkpoint.read)
    return network


def _tells() -> bool:
    """Of the ranks that know the same, one."""
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    return place == (last, 0, 0)


def _summed(told: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    return {name: float(torch.stack([one[name] for one in told]).double().sum()) for name in told[0]}
