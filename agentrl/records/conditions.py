"""The faults of a training by RL, as conditions over the history of its metrics.

no-room            prompts are as long as an episode may be
no-signal          the siblings of every group earn the same, and too little
truncation-pays    truncation and the reward rise: truncated episodes earn no less than the others
entropy-grows      the policy becomes more random, and the reward does not rise
repeats            the policy says the same over and over, and did not at first
overfitting        the reward of training rises, and the score on held-out tasks does not
collapsed          the reward, or the held-out score, has lost most of what was gained
stale              the policy that trains on tokens of older weights would hardly sample them any more
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import TypeAlias

from agentrl.records.trends import (
    ENTROPY,
    GROUPS,
    HELD_OUT,
    MIN_SPREAD,
    NO_ROOM,
    PROCESSED,
    REPETITION,
    REWARD,
    SHARES,
    SPREAD,
    STEPS,
    TEACHER,
    TRUNCATED,
    TRUNCATED_REWARD,
    WINDOW,
    ZERO_STD,
    MetricHistory,
    Row,
    RunFacts,
    Trend,
    mean_at,
    means_of,
)

MIN_IDLE_STEPS, MIN_IDLE_GROUPS = 3, 64
"""Iterations in a row without signal, and the groups in them.

After n groups without an event, its rate is below 3 / n with 95% confidence: with 64 below 4.7% of groups.
Source: J. Hanley and A. Lippman-Hand, If nothing goes wrong, is everything all right?, JAMA 249 (1983).
"""
TRUNCATION_GROWS = 0.2
"""Share of episodes. In the example runs truncation varies by less than half of that."""
ENTROPY_GROWS, MIN_ENTROPY_GAIN = 2.0, 0.3
"""Factor, and nats for each token. With a reward that rises, entropy falls: https://arxiv.org/abs/2505.22617."""
REPETITION_GROWS = 0.2
"""Share of episodes. Of a model that solves its tasks next to none repeats itself."""
GAP_GROWS = 0.2
"""A share of the scale: by how much more the reward of training has risen than the held-out score."""
STANDARD_ERRORS = 3.0
"""How many of a difference decide, where few episodes are evaluated, or batches differ."""
SHORT = 3
"""Iterations of a mean where a fault destroys within some of them."""
SCORE_FALLS = 0.2
"""A share of the scale, by which the best score is missed."""
NOISE_SHARE = 0.9
"""Of the episodes of a few iterations, those that are truncated."""
NO_ROOM_SHARE = 0.01
"""Of the episodes of an iteration."""
LEAST_SHARE = 0.5
"""Of the tokens of an age, the effective share: (sum of ratios)^2 / (number x sum of squared ratios)."""


def _no_room(history: MetricHistory, _: RunFacts) -> str | None:
    rows = history.training()
    share = rows[-1].get(NO_ROOM, 0.0) if rows else 0.0
    if share < NO_ROOM_SHARE:
        return None
    return (
        f"in {share:.0%} of the episodes of an iteration the prompt was as long as an episode may be, so the "
        "model could not write a single token."
    )


def _no_signal(history: MetricHistory, facts: RunFacts) -> str | None:
    rows = history.training(ZERO_STD, STEPS)
    idle = list(takewhile(lambda row: _is_idle(row, facts), reversed(rows)))
    groups = int(sum(row.get(GROUPS, 0.0) for row in idle))
    if len(idle) < MIN_IDLE_STEPS or groups < MIN_IDLE_GROUPS:
        return None
    reward = fmean(row[REWARD] for row in idle)
    if facts.is_solved(reward):
        return None
    return (
        f"in all {groups} groups of the last {len(idle)} iterations the siblings earned the same (mean "
        f"reward {reward:.3g}), so no gradient shows the policy what is better."
    )


def _is_idle(row: Row, facts: RunFacts) -> bool:
    """Whether the rewards of an iteration have no signal. A teacher, and scores of a function, are others."""
    if TEACHER in row or PROCESSED in row:
        return False
    return row.get(SPREAD, math.inf) < MIN_SPREAD or (facts.compares and row[ZERO_STD] >= 1.0)


def _truncation_pays(history: MetricHistory, facts: RunFacts) -> str | None:
    rows = history.training(TRUNCATED)
    trend = Trend.of(rows, TRUNCATED)
    if trend is None or trend.last - trend.low < TRUNCATION_GROWS or not trend.rises_with_the_reward(facts):
        return None
    truncated = [row[TRUNCATED_REWARD] for row in rows[-WINDOW:] if TRUNCATED_REWARD in row]
    if not truncated or fmean(truncated) < trend.last_reward - MIN_SPREAD:
        return None
    return (
        f"truncated episodes went from {trend.low:.0%} to {trend.last:.0%}, while the reward rose from "
        f"{trend.reward_at_low:.3g} to {trend.last_reward:.3g}: they earn {fmean(truncated):.3g}, no less "
        "than those that end."
    )


def _entropy_grows(history: MetricHistory, facts: RunFacts) -> str | None:
    trend = Trend.of(history.training(ENTROPY), ENTROPY)
    if trend is None or trend.rises_with_the_reward(facts):
        return None
    if trend.last < max(ENTROPY_GROWS * trend.low, trend.low + MIN_ENTROPY_GAIN):
        return None
    return (
        f"the entropy rose from {trend.low:.2f} to {trend.last:.2f} nats for each token, while the reward "
        f"went from {trend.reward_at_low:.3g} to {trend.last_reward:.3g}."
    )


def _repeats(history: MetricHistory, _: RunFacts) -> str | None:
    trend = Trend.of(history.training(REPETITION), REPETITION)
    if trend is None or trend.last - trend.low < REPETITION_GROWS:
        return None
    return (
        f"episodes in which the policy says the same over and over went from {trend.low:.0%} to "
        f"{trend.last:.0%}, while the reward went from {trend.reward_at_low:.3g} to {trend.last_reward:.3g}."
    )


def _overfitting(history: MetricHistory, facts: RunFacts) -> str | None:
    scores = history.of(HELD_OUT)
    if len(scores) < 2 or not history.training():
        return None
    first, last = min(scores), max(scores)
    gained = mean_at(history, REWARD, last) - mean_at(history, REWARD, first)
    gap = gained - (scores[last] - scores[first])
    # The variance of a score between 0 and 1 is at most 1/4; this is a difference of two means.
    error = math.sqrt(2 * 0.25 / max(facts.eval_episodes, 1))
    if min(gained, gap) < GAP_GROWS * facts.scale or gap < STANDARD_ERRORS * error * facts.scale:
        return None
    return (
        f"the reward of training has risen by {gained:.3g} since step {first}, while the score on held-out "
        f"tasks went from {scores[first]:.3g} to {scores[last]:.3g}."
    )


def _collapsed(history: MetricHistory, facts: RunFacts) -> str | None:
    rows = history.training()
    error = math.sqrt(0.25 / max(sum(row.get(GROUPS, 1.0) for row in rows[-SHORT:]), 1.0))
    in_training = _fall(means_of([row[REWARD] for row in rows], SHORT), error, facts)
    scores = [*history.of(HELD_OUT).values()]
    held_out = _fall(scores, math.sqrt(0.25 / max(facts.eval_episodes, 1)), facts)
    what, fall = ("reward of training", in_training) if in_training else ("held-out score", held_out)
    if fall is None:
        return _noise(history, facts)
    best, last = fall
    return f"the {what} is {last:.3g}, and has been {best:.3g}: the policy has lost what it had learned."


def _noise(history: MetricHistory, facts: RunFacts) -> str | None:
    """Where little had been learned a lost policy costs little reward, but hardly any episode of it ends."""
    rows = history.training(TRUNCATED)
    shares, rewards = (means_of([row[name] for row in rows], SHORT) for name in (TRUNCATED, REWARD))
    if not shares or shares[-1] < NOISE_SHARE or min(shares) > NOISE_SHARE / 2:
        return None
    before, last = rewards[shares.index(min(shares))], rewards[-1]
    if before <= facts.chance_score:
        return None
    if last - facts.chance_score > (before - facts.chance_score) / 2:
        return None
    return (
        f"{shares[-1]:.0%} of the episodes are truncated, where {min(shares):.0%} were, and the reward of "
        f"training went from {before:.3g} to {last:.3g}: the policy writes noise."
    )


def _fall(means: Sequence[float], error: float, facts: RunFacts) -> tuple[float, float] | None:
    """The best and the last of these scores, where most of what was gained over chance is lost again.

    error: the standard error of one of them, on a scale of 1.
    """
    if len(means) < 2:
        return None
    best, last = max(means), means[-1]
    lost = max(SCORE_FALLS, STANDARD_ERRORS * math.sqrt(2) * error) * facts.scale
    is_most = last - facts.chance_score < (best - facts.chance_score) / 2
    return (best, last) if is_most and best - last > lost else None


def _stale(history: MetricHistory, _: RunFacts) -> str | None:
    rows = history.training()[-SHORT:]
    shares = {name: [row[name] for row in rows if name in row] for name in SHARES}
    means = {name: fmean(values) for name, values in shares.items() if len(values) == SHORT}
    if not means or min(means.values()) >= LEAST_SHARE:
        return None
    name = min(means, key=means.__getitem__)
    age = SHARES[name]
    return (
        f"tokens that are {age} version{'s' if age > 1 else ''} old count for {means[name]:.0%} of their "
        f"number ({name}): the policy has moved too far since they were sampled."
    )


Condition: TypeAlias = Callable[[MetricHistory, RunFacts], str | None]
"""The sentence of a diagnosis where it holds, else None."""

CONDITIONS: Mapping[str, Condition] = {
    "no-room": _no_room,
    "no-signal": _no_signal,
    "truncation-pays": _truncation_pays,
    "entropy-grows": _entropy_grows,
    "repeats": _repeats,
    "overfitting": _overfitting,
    "collapsed": _collapsed,
    "stale": _stale,
}
WARM_START = "a warm start (warm_start_steps), since the model is fresh and writes noise; "
REMEDIES: Mapping[str, str] = {
    "no-room": "a higher rollout_max_context_len; or rollout_max_prompt_len, to leave such prompts out.",
    "no-signal": "easier tasks; rewards for parts of a solution; more episodes of each prompt "
    "(n_samples_per_prompt).",
    "truncation-pays": "rewards that are paid once, at the end, from 0 (`agentrl envs check` finds those "
    "that pay for leaving); higher limits, where good answers are cut. Where lasting is the task, go on.",
    "entropy-grows": "a lower lr, entropy_coef or eps_clip_high; a penalty on the KL to the reference "
    "(use_kl_loss and kl_loss_coef).",
    "repeats": "a look at such episodes (`agentrl view`); a reward that a loop cannot earn; a lower lr, or a "
    "penalty on the KL to the reference (use_kl_loss and kl_loss_coef).",
    "overfitting": "more tasks, or more varied ones; fewer iterations (the best "
    "checkpoint is kept); a penalty on the KL to the reference (use_kl_loss and kl_loss_coef).",
    "collapsed": "a lower lr, or a few steps of lr_warmup_iters; a penalty on the KL to the reference "
    "(use_kl_loss and kl_loss_coef). The weights that scored best are checkpoint-best when the run ends.",
    "stale": "a lower lr; a smaller max_staleness or staleness_window.",
}
