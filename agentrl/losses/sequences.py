"""Sums and means over the sequences of a micro-batch. N loss tokens, S sequences.

A file of its own: where a sequence is sharded over several processes, only this sum has to change.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(x_N: Tensor, sequence_N: Tensor) -> Tensor:
    """For each token the sum of `x_N` over the tokens of its sequence, [N], in the dtype of `x_N`.

    Differentiable. sequence_N: int64 [N], 0 to S - 1. As S <= N, the sums fit into N elements, so that
    the number of sequences need not be copied from the device, which would synchronize with it.
    """
    return torch.zeros_like(x_N).index_add(0, sequence_N, x_N).index_select(0, sequence_N)


def sequence_mean(x_N: Tensor, sequence_N: Tensor) -> Tensor:
    """For each token the mean of `x_N` over the tokens of its sequence, [N]; see `sequence_sum`."""
    return sequence_sum(x_N, sequence_N) / sequence_sum(torch.ones_like(x_N), sequence_N)
