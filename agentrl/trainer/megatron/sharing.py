"""The assignment of samples to replicas, balanced so that all finish at about the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.types import BoolArray

# A layer's matrices have 12 width^2 elements; on average a token attends to half of the sequence.
_MATRICES = 12


def shares_of(masks: Sequence[BoolArray], replicas: int, width: int) -> list[list[BoolArray]]:
    """The masks for each replica: each sample's mask for one replica, and an empty mask for the others.

    Greedy: samples are assigned by descending cost, each to the replica with the least load so far.
    """
    costs = [cost_of(mask, width) for mask in masks]
    owners, loads = [0] * len(masks), [0.0] * replicas
    for number in sorted(range(len(masks)), key=lambda number: -costs[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return [
        [mask if owner == replica else np.zeros_like(mask) for mask, owner in zip(masks, owners, strict=True)]
        for replica in range(replicas)
    ]


def cost_of(mask: BoolArray, width: int) -> float:
    """The cost of a sample, in tokens without context. width: of the model's states.

    A token costs 24 width^2 + 2 width x context operations a layer (https://arxiv.org/abs/2001.08361, table
    1, with N = 12 layers x width^2). A sample ends before its last predicted token.
    """
    at = np.flatnonzero(mask)
    tokens = int(at[-1]) if len(at) else 0
    return tokens * (1 + tokens / (_MATRICES * width))
