"""From the last stage's hidden states to outputs at a row's tokens: logprobs, or a critic's values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.nn.functional import linear

from agentrl.losses import Targets, TokenOutputs, logprobs_and_entropy, to_device
from agentrl.trainer.megatron.device import compute_device
from agentrl.trainer.megatron.model.network import Network
from agentrl.trainer.megatron.model.rows import RowShard
from agentrl.trainer.megatron.model.vocabulary import head_ranks

OutputFunction = Callable[[Network, RowShard, Tensor], TokenOutputs]
"""A network's outputs at a row's N tokens. States: [1, t, width]; under sequence parallelism a part of t."""


def logprobs_of(
    network: Network, row: RowShard, states: Tensor, *, entropy_gradient: bool = False
) -> TokenOutputs:
    """Logprobs and entropies, from the parts of the vocabulary that the tensor ranks have."""
    hidden, micro = _for_the_head(network, states[0]), row.micro_batch
    outputs = logprobs_and_entropy(
        hidden.index_select(0, on_device(row.predictor_n)),
        network.head,
        Targets(
            on_device(micro.targets_N[row.chosen_n]),
            on_device(micro.temperature_N[row.chosen_n]),
            None if micro.kept_N is None else micro.kept_N.take(row.chosen_n),
        ),
        ranks=head_ranks(),
        entropy_gradient=entropy_gradient,
    )
    squares_n = outputs.sum_pi_squared_N
    return TokenOutputs(
        _of_all_ranks(outputs.logp_N, network, row),
        _of_all_ranks(outputs.entropy_N, network, row),
        sum_pi_squared_N=None if squares_n is None else _of_all_ranks(squares_n, network, row),
    )


def values_of(network: Network, row: RowShard, states: Tensor) -> TokenOutputs:
    """The return that a critic predicts before each token; its logprobs and entropies are 0."""
    hidden = states[0]
    if network.layout.sequence_parallel:
        # Every tensor rank computes the same values from the gathered states: gradients are not summed.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    values_n = linear(hidden.index_select(0, on_device(row.predictor_n)), network.value_weight)[:, 0]
    precise = torch.promote_types(values_n.dtype, torch.float32)
    values_N = _of_all_ranks(values_n.to(precise), network, row)
    zeros_N = torch.zeros_like(values_N)
    return TokenOutputs(zeros_N, zeros_N, values_N)


def ahead_sum(
    network: Network, row: RowShard, states: Tensor, packed: PackedSeqParams, weights: Sequence[float]
) -> Tensor:
    """The weighted sum of what the predictions further ahead lose (cross-entropy) on this rank's tokens.

    Layers that predict ahead learn from it, and nothing else does: neither states nor embedding nor head.
    weights: of a token's term, by depth. At temperature 1, over the whole vocabulary.
    """
    head = network.head._replace(weight_VD=network.head.weight_VD.detach())
    states = states.detach().transpose(0, 1)
    total = states.new_zeros((), dtype=torch.promote_types(states.dtype, torch.float32))
    for layer, ahead, weight in zip(network.ahead.layers, row.ahead, weights, strict=True):
        embedded = network.ahead.embedded(on_device(ahead.input_ids_t))
        states = layer(states, embedded, packed)
        targets_n = on_device(row.micro_batch.targets_N[ahead.chosen_n])
        outputs = logprobs_and_entropy(
            _for_the_head(network, states[:, 0]).index_select(0, on_device(ahead.predictor_n)),
            head,
            Targets(targets_n, torch.ones_like(targets_n, dtype=total.dtype), None),
            ranks=head_ranks(),
        )
        total = total - weight * outputs.logp_N.sum()
    return total


def _for_the_head(network: Network, states: Tensor) -> Tensor:
    """States [t, width] of all tokens. Gradients of tensor ranks, each of its own part of the vocabulary, are
    summed."""
    gather = (
        gather_from_sequence_parallel_region
        if network.layout.sequence_parallel
        else copy_to_tensor_model_parallel_region
    )
    gathered: Tensor = gather(states)
    return gathered


def on_device(array: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> Tensor:
    """The array on the device of this rank."""
    return to_device(array, compute_device())


def _of_all_ranks(values_n: Tensor, network: Network, row: RowShard) -> Tensor:
    """[N]: the values of all context ranks, each at its index; a gradient flows to the rank of the value."""
    if network.layout.context_parallel_size == 1:
        return values_n
    own_N = values_n.new_zeros(len(row.micro_batch.targets_N))
    all_N: Tensor = reduce_from_tensor_model_parallel_region(
        own_N.index_copy(0, on_device(row.chosen_n), values_n),
        group=parallel_state.get_context_parallel_group(),
    )
    return all_N
