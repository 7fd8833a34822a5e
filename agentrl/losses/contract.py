"""The contract of every loss, also one of your own, checked on small synthetic batches.

N loss tokens. One helper makes batches, one runs a loss on them; `check_loss` compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.losses.base import Loss, LossInputs, TokenExtra, TokenOutputs, extras_used
from agentrl.types import Extra

_LENGTHS = (3, 1, 5, 2)
_HALVES = ((0, 2), (1, 3))
_GAP = 1e4


class _LossBatch(NamedTuple):
    outputs: TokenOutputs
    inputs: LossInputs
    extras: Mapping[str, Extra] = MappingProxyType({})


class _Result(NamedTuple):
    """gradients: with respect to logp_N, entropy_N and values_N."""

    sum: Tensor
    gradients: tuple[Tensor, ...]
    metrics: dict[str, Tensor]


def check_loss(loss: Loss) -> None:
    """Check a loss: `check_loss(my_loss)`. It takes milliseconds and needs no model.

    - It is a sum over sequences: the micro-batches of a batch add up to its sum, its gradient and its
      metrics, under the same names. So it does not average on its own.
    - It is weights_N x a term: three times the weights are three times the sum and the gradient.
    - Its metrics are detached scalars, and it does not change its inputs.
    - It has a gradient, and the sum, the gradient and the metrics are finite where logprobs or values are
      10,000 apart.

    The loss is called with all fields of TokenOutputs and LossInputs, entropy with a gradient, and the extras
    that its attribute `extras` declares.

    Raises:
        ValueError: the contract is violated; the message is one sentence.
    """
    batch = _with_extras(_ordinary(), loss)
    total = _run(loss, batch)
    if not any(gradient.any() for gradient in total.gradients):
        raise ValueError(
            "the loss has no gradient: neither logp_N nor entropy_N nor values_N reaches its sum"
        )
    sequences = [_part(batch, [index]) for index in range(len(_LENGTHS))]
    _compare(total, [_run(loss, sequence) for sequence in sequences], range(len(_LENGTHS)))
    _compare(total, [_run(loss, _part(batch, half)) for half in _HALVES], (*_HALVES[0], *_HALVES[1]))
    inputs = batch.inputs
    heavier = _run(loss, batch._replace(inputs=inputs._replace(weights_N=3.0 * inputs.weights_N)))
    tripled = [3.0 * tensor for tensor in (total.sum, *total.gradients)]
    if not all(_close(*pair) for pair in zip((heavier.sum, *heavier.gradients), tripled, strict=True)):
        raise ValueError(
            "the loss is not a sum of weights_N x term_N: three times the weights do not triple it"
        )
    extreme = _run(loss, _with_extras(_extreme(), loss))
    for name, tensor in {"sum": extreme.sum, **extreme.metrics}.items():
        if not tensor.isfinite():
            raise ValueError(f"the loss's {name} is not finite where logprobs are {_GAP:g} apart; cap them")
    if not all(gradient.isfinite().all() for gradient in extreme.gradients):
        raise ValueError(f"the loss's gradient is not finite where logprobs are {_GAP:g} apart; cap them")


def _run(loss: Loss, batch: _LossBatch) -> _Result:
    outputs = TokenOutputs(
        *(_clone(tensor).requires_grad_() for tensor in batch.outputs if tensor is not None)
    )
    extras = {name: TokenExtra.of(extra) for name, extra in batch.extras.items()}
    inputs = _mapped(batch.inputs, _clone)._replace(extras=extras)
    total, metrics = loss(outputs, inputs)
    copies = {name: TokenExtra.of(extra) for name, extra in batch.extras.items()}
    unchanged = batch.inputs._replace(extras=copies)
    before = [*(tensor for tensor in batch.outputs if tensor is not None), *_tensors(unchanged)]
    after = [*(tensor for tensor in outputs if tensor is not None), *_tensors(inputs)]
    if not all(torch.equal(*pair) for pair in zip(after, before, strict=True)):
        raise ValueError("the loss changes its inputs in place; work on copies")
    if total.shape != () or not total.requires_grad:
        raise ValueError("the loss's sum must be a scalar with a gradient")
    if any(metric.shape != () or metric.requires_grad for metric in metrics.values()):
        raise ValueError("the loss's metrics must be scalars, detached from the graph")
    leaves = [leaf for leaf in outputs if leaf is not None]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return _Result(total.detach(), gradients, dict(metrics))


def _compare(total: _Result, parts: Sequence[_Result], order: Sequence[int]) -> None:
    """Compare a batch with its parts. order: the indices of the parts' sequences in the batch."""
    if any(part.metrics.keys() != total.metrics.keys() for part in parts):
        raise ValueError(
            "the loss returns other metrics for other micro-batches; return the same names always"
        )
    advice = "sum over tokens, and leave every mean to weights_N"
    if not _close(torch.stack([part.sum for part in parts]).sum(), total.sum):
        raise ValueError(f"the loss of two micro-batches is not the loss of both together; {advice}")
    for gradient, pieces in zip(
        total.gradients, zip(*(p.gradients for p in parts), strict=True), strict=True
    ):
        if not _close(torch.cat(pieces), gradient[_tokens(order)]):
            raise ValueError(f"a token's gradient depends on the other sequences; {advice}")
    for name, metric in total.metrics.items():
        if not _close(torch.stack([part.metrics[name] for part in parts]).sum(), metric):
            raise ValueError(
                f"the loss's metric {name} is no sum over tokens: those of micro-batches must add up"
            )


def _close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual.double(), expected.double(), rtol=1e-4, atol=1e-5)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _ordinary() -> _LossBatch:
    """Ratios inside and outside usual bounds, advantages of both signs, float64."""
    generator = torch.Generator().manual_seed(0)
    count = sum(_LENGTHS)

    def normal(centre: float, spread: float) -> Tensor:
        return centre + spread * torch.randn(count, generator=generator, dtype=torch.float64)

    logp_N = -normal(2.0, 1.0).abs()
    values_N = normal(0.0, 1.0)
    inputs = LossInputs(
        proximal_logp_N=logp_N + normal(0.0, 0.4),
        behaviour_logp_N=logp_N + normal(0.0, 0.4),
        advantages_N=normal(0.0, 1.0),
        weights_N=normal(0.1, 0.02).abs(),
        sequence_N=torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS)),
        ref_logp_N=logp_N + normal(0.0, 0.4),
        returns_N=normal(0.0, 1.0),
        old_values_N=values_N + normal(0.0, 0.4),
        staleness_N=torch.arange(count) % 3,
    )
    return _LossBatch(TokenOutputs(logp_N, normal(1.0, 0.2).abs(), values_N), inputs)


def _extreme() -> _LossBatch:
    """Every combination of certain and impossible, fp32, in sequences of four and then of one token."""
    rows = [(0.0, -_GAP)] * 4 + [(1.0, -1.0)]
    corners = torch.tensor([*product(*rows)], dtype=torch.float32)
    corners = torch.cat([corners, corners])
    logp_N, old_N, engine_N, ref_N, sign_N = corners.unbind(1)
    half = len(corners) // 2
    inputs = LossInputs(
        proximal_logp_N=old_N,
        behaviour_logp_N=engine_N,
        advantages_N=10.0 * sign_N,
        weights_N=torch.full_like(logp_N, 0.1),
        sequence_N=torch.cat([torch.arange(half) // 4, half // 4 + torch.arange(half)]),
        ref_logp_N=ref_N,
        returns_N=-ref_N,
        old_values_N=old_N,
        staleness_N=torch.arange(2 * half) % 3,
    )
    return _LossBatch(TokenOutputs(logp_N, torch.ones_like(logp_N), engine_N), inputs)


def _tokens(order: Sequence[int]) -> Tensor:
    """The indices of the tokens of some sequences of the ordinary batch."""
    starts = [sum(_LENGTHS[:index]) for index in order]
    return torch.cat([torch.arange(s, s + _LENGTHS[i]) for s, i in zip(starts, order, strict=True)])


def _part(batch: _LossBatch, order: Sequence[int]) -> _LossBatch:
    """Some sequences of the ordinary batch, with indices from 0."""
    chosen = _tokens(order)
    outputs = TokenOutputs(*(tensor[chosen] for tensor in batch.outputs if tensor is not None))
    inputs = _mapped(batch.inputs, lambda tensor: tensor[chosen])
    extras = {name: extra.take(chosen.numpy()) for name, extra in batch.extras.items()}
    lengths = torch.tensor([_LENGTHS[index] for index in order])
    sequence_N = torch.repeat_interleave(torch.arange(len(order)), lengths)
    return _LossBatch(outputs, inputs._replace(sequence_N=sequence_N), extras)


def _with_extras(batch: _LossBatch, loss: Loss) -> _LossBatch:
    """The batch with the extras that the loss declares; ragged ones have 0, 1 or 2 values for each token."""
    count = len(batch.inputs.weights_N)
    extras = {}
    for name, spec in extras_used(loss).items():
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.arange(count) % 3)])
        size = int(offsets[-1]) if spec.ragged else count
        values = np.arange(size * math.prod(spec.shape)).reshape(size, *spec.shape) % 5
        extras[name] = Extra(values.astype(spec.dtype), offsets if spec.ragged else None, spec.fill)
    return batch._replace(extras=extras)


def _tensors(inputs: LossInputs) -> list[Tensor]:
    """All tensors, those of extras included."""
    extras = [tensor for extra in inputs.extras.values() for tensor in extra if tensor is not None]
    return [*(field for field in inputs if isinstance(field, Tensor)), *extras]


def _mapped(inputs: LossInputs, function: Callable[[Tensor], Tensor]) -> LossInputs:
    changed = {name: function(field) for name, field in inputs._asdict().items() if isinstance(field, Tensor)}
    return LossInputs(**{**inputs._asdict(), **changed})
