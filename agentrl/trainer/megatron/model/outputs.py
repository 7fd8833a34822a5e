"""From the last stage's hidden states to outputs at a row's tokens: logprobs, or a critic's values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
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
    hidden = states[0]
    # Each tensor rank's gradient is of its own part of the vocabulary: they are summed.
    if network.layout.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    micro = row.micro_batch
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
