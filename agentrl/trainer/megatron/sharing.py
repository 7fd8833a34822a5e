"""Which replica goes through which samples, so that all are ready at about the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.types import BoolArray

# Twelve squares of the width are the matrices of a layer; a token looks back at half of the others.
_MATRICES = 12


def shares_of(masks: Sequence[BoolArray], replicas: int, width: int) -> list[list[BoolArray]]:
    """The masks for each replica, each sample under one of them, elsewhere nothing of it.

    The dearest sample goes first, each to who has least to do so far.
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
    """What a sample costs, in tokens that look back at nothing. width: of the model's states.

    A token costs 24 width^2 + 2 width x context operations a layer (https://arxiv.org/abs/2001.08361, table
    1, with N = 12 layers x width^2). A sample goes in as far as its last predicted token needs.
    """
    at = np.flatnonzero(mask)
    tokens = int(at[-1]) if len(at) else 0
    return tokens * (1 + tokens / (_MATRICES * width))
