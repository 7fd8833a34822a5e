"""The inputs of a loss for the tokens of a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.losses import LossInputs, TokenExtra
from agentrl.trainer.batch import MicroBatch
from agentrl.types import FloatArray, TrainBatch, staleness_of


def loss_inputs(row: MicroBatch, batch: TrainBatch, device: torch.device) -> LossInputs:
    """The arrays of the batch at the row's predicted tokens, as tensors."""

    def tensor(arrays: Sequence[FloatArray]) -> Tensor:
        return torch.from_numpy(row.gather(arrays)).to(device)

    def optional(arrays: Sequence[FloatArray] | None) -> Tensor | None:
        return None if arrays is None else tensor(arrays)

    versions_N = row.gather([sample.versions for sample in batch.samples])
    counts = torch.tensor([len(at) for at in row.positions])
    return LossInputs(
        proximal_logp_N=tensor(batch.scores.proximal),
        behaviour_logp_N=tensor([sample.logprobs for sample in batch.samples]),
        advantages_N=tensor(batch.credit.advantages),
        weights_N=tensor(batch.credit.weights),
        sequence_N=torch.repeat_interleave(torch.arange(len(counts)), counts).to(device),
        ref_logp_N=optional(batch.scores.ref),
        returns_N=optional(batch.credit.returns),
        kl_cov_N=optional(batch.credit.kl_cov),
        old_values_N=optional(batch.scores.values),
        staleness_N=torch.from_numpy(staleness_of(versions_N, batch.served)).long().to(device),
        coefficients=batch.coefficients,
        extras={name: TokenExtra.of(extra, device) for name, extra in row.extras(batch.samples).items()},
    )
