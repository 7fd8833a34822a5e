"""The faults of a supervised training, as conditions over the history of its metrics.

not-finite         gradients of several steps, or the held-out loss, are not finite numbers
loss-flat          the loss of training does not fall
overfitting        the held-out loss rises again, and the loss of training still falls
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from statistics import fmean

from agentrl.records.conditions import STANDARD_ERRORS, Condition
from agentrl.records.trends import GRAD_NORM, HELD_OUT_LOSS, LOSS, History, RunFacts, mean_at

MIN_BROKEN_STEPS = 3
"""Optimizer steps whose gradients are not finite. A single one is discarded, and costs one batch."""
MIN_FLAT_STEPS, MAX_FLAT_STEPS = 20, 100
"""Steps at the beginning and at the end that are compared: half of all so far, within these bounds."""
LOSS_FALLS = 1e-4
"""A share of the loss at the beginning, for each of these steps: one that certainly fell by less is flat."""
LOSS_RISES, MIN_LOSS_GAIN = 0.1, 0.02
"""By how much the held-out loss is above its lowest value: a share of it, and nats for each token."""


def _not_finite(history: History, _: RunFacts) -> str | None:
    broken = sorted({*history.not_finite[LOSS], *history.not_finite[GRAD_NORM]})
    if evaluated := history.not_finite[HELD_OUT_LOSS]:
        return f"the held-out loss of step {evaluated[0]} is not a finite number."
    if len(broken) < MIN_BROKEN_STEPS:
        return None
    return (
        f"the gradients of {len(broken)} steps, first of step {broken[0]}, were not finite numbers, and were "
        "discarded."
    )


def _loss_flat(history: History, _: RunFacts) -> str | None:
    rows, number = history.rows.values(), min(len(history.rows) // 2, MAX_FLAT_STEPS)
    # Not all rows: a run may have a hundred thousand steps.
    first = list(islice((row[LOSS] for row in rows if LOSS in row), number))
    last = list(islice((row[LOSS] for row in reversed(rows) if LOSS in row), number))
    if len(first) < max(number, MIN_FLAT_STEPS):
        return None
    before, after = fmean(first), fmean(last)
    squares = sum((x - before) ** 2 for x in first) + sum((x - after) ** 2 for x in last)
    error = math.sqrt(squares / (number - 1) / number)
    if before - after + STANDARD_ERRORS * error > LOSS_FALLS * number * before:
        return None
    return (
        f"the loss does not fall: its mean was {before:.3g} over the first {number} steps, and is "
        f"{after:.3g} over the last {number}."
    )


def _held_out_rises(history: History, _: RunFacts) -> str | None:
    # It changes with an evaluation alone.
    losses = history.of(HELD_OUT_LOSS) if HELD_OUT_LOSS in next(reversed(history.rows.values()), {}) else {}
    if len(losses) < 2 or not history.of(LOSS):
        return None
    best, last = min(losses, key=lambda step: losses[step]), max(losses)
    low = losses[best]
    before, after = mean_at(history, LOSS, best), mean_at(history, LOSS, last)
    if losses[last] < max(low * (1 + LOSS_RISES), low + MIN_LOSS_GAIN) or after >= before:
        return None
    return (
        f"the held-out loss was lowest at step {best} ({low:.3g}), and is {losses[last]:.3g}, while the loss "
        f"of training fell from {before:.3g} to {after:.3g}."
    )


SFT_CONDITIONS: Mapping[str, Condition] = {
    "not-finite": _not_finite,
    "loss-flat": _loss_flat,
    "overfitting": _held_out_rises,
}
SFT_REMEDIES: Mapping[str, str] = {
    "not-finite": "a lower sft_lr; more steps of warmup (lr_warmup_iters); float32 in place of bf16.",
    "loss-flat": "a higher sft_lr; a look at what is imitated: the model may write like that already, and a "
    "reply that does not follow from its prompt cannot be learned.",
    "overfitting": "fewer epochs (num_epoch); more conversations, or more varied ones; a lower sft_lr.",
}
