"""Whitening of the advantages of a batch."""

from __future__ import annotations

import numpy as np

from agentrl.algorithms.tokens import Floats

_EPSILON = 1e-8


def whiten(values_N: Floats, *, shift: bool = True) -> Floats:
    """Values of all trainable tokens of the batch with mean 0 and standard deviation 1, [N].

    whitened = (value - mean) / (std + 1e-8), std over the N tokens themselves (it divides by N). Without
    `shift` the mean is added again, so that only the scale changes. Values that are all equal, or a single
    one, have no scale: they become 0, or without `shift` do not change.

    Source: https://arxiv.org/abs/2501.03262, normalisation over the global batch.
    """
    if not len(values_N):
        return values_N.copy()
    mean = values_N.mean()
    if np.all(values_N == values_N[0]):
        # The mean of equal floats need not be equal to them.
        return np.zeros_like(values_N) if shift else values_N.copy()
    whitened: Floats = (values_N - mean) / (values_N.std() + _EPSILON)
    return whitened if shift else whitened + mean
