"""Scores of a whole batch, changed before advantages are computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import TypeAlias

import numpy as np

from agentrl.types import Group, RolloutId, Verdict

RewardPostProcess: TypeAlias = Callable[[Sequence[Group]], Mapping[RolloutId, float]]
"""The new totals of rollouts of a batch; those that it leaves out keep theirs."""

BEFORE = "before_post_process"
"""The part of a verdict that is its total before."""


def post_processed(function: RewardPostProcess, groups: Sequence[Group]) -> list[Group]:
    """The groups with the totals that a function gives them; each verdict keeps the one before as a part.

    Rewards of single turns stay as they are, and what the total has beyond their sum is the episode's.

    Raises:
        ValueError: it returned no mapping, a rollout of no group, or a total that is not finite.
    """
    totals = function(groups)
    if not isinstance(totals, Mapping):
        raise ValueError(f"a reward post-processing returns totals by RolloutId, not {repr(totals)[:80]}")
    known = {verdict.rollout_id for group in groups for verdict in group.verdicts}
    if strangers := [id for id in totals if id not in known]:
        raise ValueError(f"{strangers[0]!r} is no rollout of the batch; use its RolloutId")
    for id, total in totals.items():
        if not isinstance(total, Real | np.bool_) or not math.isfinite(float(total)):
            raise ValueError(f"the total of {id} is {repr(total)[:80]}, not a finite number")

    def rated(verdict: Verdict) -> Verdict:
        total = totals.get(verdict.rollout_id)
        if total is None:
            return verdict
        return replace(verdict, total=float(total), parts={**verdict.parts, BEFORE: verdict.total})

    return [replace(group, verdicts=tuple(map(rated, group.verdicts))) for group in groups]
