"""Means and pass@k over tasks, with their 95% confidence intervals.

Episodes of one task are not independent of each other, so tasks are the units (clusters) that intervals are
computed over, in however many worlds each is played; of a single task, its worlds are. There are two methods,
and every estimate names its own:

    wilson      a score of 0 or 1, one for each task: Wilson's interval (Wilson 1927). Also where all episodes
                of all tasks agree, or there is a single task: resampling would give no width. Of a
                difference that is the same in every task: the share of tasks with another one.
    bootstrap   all else: the percentile bootstrap over tasks (Efron 1979), 10,000 resamples from a fixed
                seed. With fewer than about 20 tasks it is somewhat too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import comb
from statistics import fmean
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl.envs.check.intervals import interval

Z = 1.959964
"""The 97.5% quantile of the normal distribution: 2.5% on each side of an interval."""
SOLVED = 1.0
"""The least score of an episode that counts as solved in pass@k."""
_ROUNDING = 1e-9
_RESAMPLES = 10_000
_MAX_DRAWN = 1 << 22
_BINARY = (0.0, 1.0)

Scores: TypeAlias = Sequence[Sequence[float]]
"""The scores of the episodes of each task."""
Units: TypeAlias = Mapping[str, Mapping[str, Sequence[float]]]
"""The scores of the episodes of each prompt of each unit, see `units_of`."""


class Estimate(NamedTuple):
    """A mean over tasks, and the bounds of its 95% interval, in the units of the scores."""

    value: float
    low: float
    high: float
    method: Literal["wilson", "bootstrap"]


def mean_of(scores: Scores) -> Estimate | None:
    """The mean over all episodes; tasks without one do not count. None = there is no episode."""
    clusters = [task for task in scores if task]
    episodes = [score for task in clusters for score in task]
    if not episodes:
        return None
    value = fmean(episodes)
    is_binary = all(score in _BINARY for score in episodes)
    is_one_each = len(episodes) == len(clusters)
    if len(clusters) == 1 or (is_binary and (is_one_each or value in _BINARY)):
        declared = _BINARY if is_binary else (min(episodes), max(episodes))
        bounds = interval([fmean(task) for task in clusters], declared, z=Z)
        return Estimate(value, bounds.low, bounds.high, "wilson")
    low, high = _percentiles([sum(task) for task in clusters], [len(task) for task in clusters])
    return Estimate(value, low, high, "bootstrap")


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of P(at least one of k episodes is solved), from c solved ones of n.

    1 - C(n - c, k) / C(n, k), arXiv:2107.03374, equation 1.

    Raises:
        ValueError: not 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n = {n}, c = {c}, k = {k}")
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_of(units: Units, k: int) -> Estimate | None:
    """pass@k over the prompts with at least k episodes. None = there is no such prompt."""
    return mean_of(
        [
            [pass_at_k(len(scores), num_solved(scores), k) for scores in prompts.values() if len(scores) >= k]
            for prompts in units.values()
        ]
    )


def units_of(scores: Iterable[tuple[str, str, float]]) -> dict[str, dict[str, list[float]]]:
    """The scores of prompts, a prompt being a task in one world, by their unit: the task.

    Of a single task, each prompt is a unit, for nothing else varies. scores: task, prompt and score.
    """
    units: dict[str, dict[str, list[float]]] = {}
    for task, prompt, score in scores:
        units.setdefault(task, {}).setdefault(prompt, []).append(score)
    if len(units) > 1:
        return units
    return {prompt: {prompt: own} for prompts in units.values() for prompt, own in prompts.items()}


def pooled(units: Units) -> dict[str, list[float]]:
    """All scores of each unit."""
    return {unit: [*chain.from_iterable(prompts.values())] for unit, prompts in units.items()}


def num_solved(scores: Sequence[float]) -> int:
    """How many episodes are solved (count)."""
    return sum(score >= SOLVED - _ROUNDING for score in scores)


def ks_of(n: int) -> list[int]:
    """The k of pass@k with n episodes of each task: powers of two up to n, and n."""
    return sorted({1 << power for power in range(n.bit_length())} | {n}) if n else []


def paired_difference(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]
) -> Estimate | None:
    """The mean difference, second - first, over the tasks that both have episodes of.

    The difference of a task is that of its mean scores. Its variation between tasks cancels, so that the
    interval is narrower than those of the two means. None = there is no common task.
    """
    of_tasks = differences_of(first, second)
    if not of_tasks:
        return None
    differences = list(of_tasks.values())
    if max(differences) - min(differences) < _ROUNDING:
        scores = [score for side in (first, second) for task in of_tasks for score in side[task]]
        return _where_all_agree(differences[0], len(differences), max(scores) - min(scores))
    low, high = _percentiles(differences, [1] * len(differences))
    return Estimate(fmean(differences), low, high, "bootstrap")


def differences_of(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """The difference of the mean scores, second - first, of every task that both have episodes of."""
    common = [task for task in first if first[task] and second.get(task)]
    return {task: fmean(second[task]) - fmean(first[task]) for task in common}


def _where_all_agree(difference: float, num_tasks: int, most: float) -> Estimate:
    """The interval of a difference that all tasks have, where none is larger than `most` either way.

    Of all tasks, a share may have another: up to Wilson's upper bound for none of `num_tasks`.
    """
    others = interval([0.0] * num_tasks, _BINARY, z=Z).high
    low, high = difference - others * (difference + most), difference + others * (most - difference)
    return Estimate(difference, low, high, "wilson")


def _percentiles(sums: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    """The 2.5% and 97.5% percentiles of the mean over all episodes, of resamples of the tasks."""
    num_tasks = len(sums)
    totals: NDArray[np.float64] = np.asarray(sums, np.float64)
    counts: NDArray[np.float64] = np.asarray(sizes, np.float64)
    rng = np.random.default_rng(0)
    means: list[NDArray[np.float64]] = []
    block = max(_MAX_DRAWN // num_tasks, 1)
    for start in range(0, _RESAMPLES, block):
        shape = (min(block, _RESAMPLES - start), num_tasks)
        drawn = rng.integers(num_tasks, size=shape)
        means.append(totals[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)
