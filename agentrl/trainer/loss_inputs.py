"""The inputs of a loss for the tokens of a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.corrections import MAX_LOG_RATIO, FactorsInStep, TokenFactors
from agentrl.losses import ROUNDING, ROUNDING_BF16, LossInputs, TokenExtra, TokenOutputs, to_device
from agentrl.trainer.batch import MicroBatch, by_sample
from agentrl.types import FactorFunction, FloatArray, Sample, TrainBatch, staleness_of


class StepInputs:
    """The inputs of a loss in one optimizer step, row by row.

    Where the batch has its proximal logprobs taken `in_step`, they are the current ones, without their
    gradient, and the factors of its correction multiply the advantages. Factors of tokens are computed on
    their device; for those of whole sequences a row is read from it. bf16: of the passes of the trainer.
    """

    def __init__(self, batch: TrainBatch, *, bf16: bool = False) -> None:
        self._batch = batch
        self._rounding = ROUNDING_BF16 if bf16 else ROUNDING
        self._current: list[tuple[MicroBatch, Tensor]] = []

    def of(self, row: MicroBatch, outputs: TokenOutputs) -> LossInputs:
        """The inputs for a row and the outputs of its forward pass."""
        inputs = loss_inputs(row, self._batch, outputs.logp_N.device)._replace(rounding=self._rounding)
        in_step = self._batch.in_step
        # What has values is a critic, which has no logprobs.
        if in_step is None or outputs.values_N is not None:
            return inputs
        logp_N = outputs.logp_N.detach()
        self._current.append((row, logp_N))
        inputs = inputs._replace(proximal_logp_N=logp_N)
        if in_step.factors is None:
            return inputs
        factors, precise_N = in_step.factors, logp_N.float()
        of_tokens = factors.correction.of_tokens if isinstance(factors, FactorsInStep) else None
        if of_tokens is None:
            array = _factors(row, self._batch.samples, factors, precise_N.cpu().numpy())
            factors_N = to_device(array, logp_N.device)
        else:
            factors_N = token_factors(of_tokens, precise_N.double() - inputs.behaviour_logp_N.double())
        return inputs._replace(advantages_N=inputs.advantages_N * factors_N)

    def logprobs(self) -> dict[int, FloatArray]:
        """The current logprobs that were taken as the proximal ones, by sample; none where others are."""
        if not self._current:
            return {}
        logprobs: FloatArray = torch.cat([logp_N for _, logp_N in self._current]).float().cpu().numpy()
        return by_sample([row for row, _ in self._current], logprobs)


def token_factors(factors: TokenFactors, log_ratio_N: Tensor) -> Tensor:
    """The factors of tokens, float32 [N]. log_ratio_N: float64, proximal minus behaviour logprobs."""
    d_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = d_N.exp()
    factor_N = ratio_N.clamp(factors.low, factors.high)
    if factors.masks:
        factor_N = torch.where(factor_N == ratio_N, ratio_N, 0.0)
    if factors.gate is not None:
        statistic, lower, upper = factors.gate
        value_N = d_N if statistic == "k1" else 0.5 * d_N**2 if statistic == "k2" else d_N.expm1() - d_N
        factor_N = torch.where((value_N >= lower) & (value_N <= upper), factor_N, 0.0)
    return factor_N.float()


def _factors(
    row: MicroBatch, samples: Sequence[Sample], factors: FactorFunction, logp_N: FloatArray
) -> FloatArray:
    """The factors of the row's tokens, [N]. logp_N: their logprobs."""
    # Then no gradient is finite, and the step is discarded; the driver says why.
    if not np.all(np.isfinite(logp_N)):
        return np.ones_like(logp_N)
    members = [samples[member] for member in row.members]
    arrays = [np.zeros(len(member), dtype=np.float32) for member in members]
    for array, at, values in zip(arrays, row.positions, row.split(logp_N), strict=True):
        array[at] = values
    computed = factors(members, arrays)
    return np.concatenate([array[at] for array, at in zip(computed, row.positions, strict=True)])


def loss_inputs(row: MicroBatch, batch: TrainBatch, device: torch.device) -> LossInputs:
    """The arrays of the batch at the row's predicted tokens, as tensors."""

    def tensor(arrays: Sequence[FloatArray]) -> Tensor:
        return to_device(row.gather(arrays), device)

    def optional(arrays: Sequence[FloatArray] | None) -> Tensor | None:
        return None if arrays is None else tensor(arrays)

    versions_N = row.gather([sample.versions for sample in batch.samples])
    counts = [len(at) for at in row.positions]
    return LossInputs(
        proximal_logp_N=tensor(batch.scores.proximal),
        behaviour_logp_N=tensor([sample.logprobs for sample in batch.samples]),
        advantages_N=tensor(batch.credit.advantages),
        weights_N=tensor(batch.credit.weights),
        sequence_N=to_device(np.repeat(np.arange(len(counts)), counts), device),
        ref_logp_N=optional(batch.scores.ref),
        returns_N=optional(batch.credit.returns),
        kl_cov_N=optional(batch.credit.kl_cov),
        old_values_N=optional(batch.scores.values),
        staleness_N=to_device(staleness_of(versions_N, batch.served).astype(np.int64), device),
        coefficients=batch.coefficients,
        extras={name: TokenExtra.of(extra, device) for name, extra in row.extras(batch.samples).items()},
    )
