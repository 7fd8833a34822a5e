"""Means over the sequences of a micro-batch. N loss tokens, S sequences.

Alone in its file: where a sequence is spread over several processes, only this sum has to know.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_mean(x_N: Tensor, sequence_N: Tensor) -> Tensor:
    """For each token the mean of `x_N` over the tokens of its sequence, [N], in the dtype of `x_N`.

    Differentiable. sequence_N: int64 [N], 0 to S - 1. As S <= N, sums have room in N places, so
    that nothing has to wait for a device to say how many sequences there are.
    """
    sums_S = torch.zeros_like(x_N).index_add(0, sequence_N, x_N)
    counts_S = torch.zeros_like(x_N).index_add(0, sequence_N, torch.ones_like(x_N))
    return sums_S.index_select(0, sequence_N) / counts_S.index_select(0, sequence_N)
