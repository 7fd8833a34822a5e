"""Confidence intervals of mean scores.

One rule for every kind of score: Wilson's interval (Wilson 1927, "Probable inference, the law of
succession, and statistical inference") for the mean of n values that have been scaled to [0, 1]. For 0/1
scores it is exactly Wilson's; for others it is wide enough, since a variable in [0, 1] with mean m has a
variance of at most m (1 - m). Z is for 99.9% on each side, because a check makes some thirty comparisons
and false alarms must be rare.

Differences between pairs of episodes that have the same task, seed and actions vary little, and have no range
of their own: the lower bound of their mean is the normal one, Z standard errors below it.

A mean of exactly 1 (or 0) has 1 (or 0) inside its interval, and any other mean excludes it: an expert with
a declared score of 1 must always reach it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

Z = 3.09
ROUNDING = 1e-9


class Interval(NamedTuple):
    """A mean and the bounds of its confidence interval, in the scores' own units."""

    mean: float
    low: float
    high: float


def interval(scores: Sequence[float], declared: Sequence[float], *, z: float = Z) -> Interval:
    """The interval of the mean of at least one score; the range is that of `scores` and `declared`.

    z: the quantile of the normal distribution at each end.
    """
    mean = fmean(scores)
    low, high = min(*scores, *declared), max(*scores, *declared)
    if high == low:
        return Interval(mean, mean, mean)
    m, n = (mean - low) / (high - low), len(scores)
    centre = m + z * z / (2 * n)
    spread = z * math.sqrt(max(m * (1 - m), 0.0) / n + z * z / (4 * n * n))
    scale = (high - low) / (1 + z * z / n)
    bounds = Interval(mean, low + scale * (centre - spread), low + scale * (centre + spread))
    return bounds._replace(low=min(bounds.low, mean), high=max(bounds.high, mean))


def lowest_mean(differences: Sequence[float]) -> float:
    """The lower bound of the mean of at least two paired differences."""
    return fmean(differences) - Z * stdev(differences) / math.sqrt(len(differences))
