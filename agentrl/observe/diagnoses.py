"""What goes wrong in a training, read from the history of its metrics.

A diagnosis is a condition over the steps so far, a sentence with its figures, and what to try. It is made
once, at the first step at which its condition holds: printed, appended to diagnoses.jsonl in the run's
folder, listed in summary.json and shown in the report. Nothing acts on it: no decision reads a metric.

    no-signal          the siblings of every group earn the same, and too little
    truncation-pays    truncation and the reward rise: truncated episodes earn no less than the others
    entropy-grows      the policy becomes more random, and the reward does not rise
    overfitting        the reward of training rises, and the score on held-out tasks does not

In supervised training (`agentrl sft`):

    not-finite         gradients of several steps, or the held-out loss, are not finite numbers
    loss-flat          the loss of training does not fall
    overfitting        the held-out loss rises again, and the loss of training still falls

Trends compare means over windows of 5 iterations, so a single batch decides nothing. Rewards are compared on
the scale of the environment, from chance_score to expert_score. `tests/observe/test_diagnoses.py` checks that
none holds on the recorded metrics of healthy runs, and each on those of a run with its fault.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeAlias

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import RecordError
from agentrl.observe import lines
from agentrl.observe.metrics import Record, read_metrics

DIAGNOSES = "diagnoses.jsonl"
"""The file in the run's folder."""

MIN_IDLE_STEPS, MIN_IDLE_GROUPS = 3, 64
"""Iterations in a row without signal, and the groups in them.

After n groups without an event, its rate is below 3 / n with 95% confidence: with 64 below 4.7% of groups.
Source: J. Hanley and A. Lippman-Hand, If nothing goes wrong, is everything all right?, JAMA 249 (1983).
"""
SOLVED = 0.05
"""How far below the expert's score tasks count as solved: a share of the scale."""
WINDOW = 5
"""Iterations of a mean."""
TRUNCATION_GROWS = 0.2
"""Share of episodes. In the example runs truncation varies by less than half of that."""
ENTROPY_GROWS, MIN_ENTROPY_GAIN = 2.0, 0.3
"""Factor, and nats for each token. With a reward that rises, entropy falls: https://arxiv.org/abs/2505.22617."""
REWARD_RISES = 0.02
"""A share of the scale: the standard error of a mean over 512 episodes of success or failure."""
GAP_GROWS = 0.2
"""A share of the scale: by how much more the reward of training has risen than the held-out score."""
STANDARD_ERRORS = 3.0
"""How many of a difference decide, where few episodes are evaluated, or batches differ."""
MIN_BROKEN_STEPS = 3
"""Optimizer steps whose gradients are not finite. A single one is discarded, and costs one batch."""
MIN_FLAT_STEPS, MAX_FLAT_STEPS = 20, 100
"""Steps at the beginning and at the end that are compared: half of all so far, within these bounds."""
LOSS_FALLS = 1e-4
"""A share of the loss at the beginning, for each of these steps: one that certainly fell by less is flat."""
LOSS_RISES, MIN_LOSS_GAIN = 0.1, 0.02
"""By how much the held-out loss is above its lowest value: a share of it, and nats for each token."""
_MIN_SPREAD = 1e-9

_REWARD, _SPREAD = "rollout/raw_reward", "rollout/raw_reward_std"
_ZERO_STD, _GROUPS = "rollout/zero_std/ratio", "rollout/prompts"
_TRUNCATED, _TRUNCATED_REWARD = "rollout/truncated_ratio", "rollout/truncated_reward"
_ENTROPY, _STEPS, _TEACHER = "train/entropy_loss", "train/optimizer_steps", "train/opd_kl"
_HELD_OUT = "eval/sampled"
_LOSS, _GRAD_NORM, _HELD_OUT_LOSS = "train/loss", "train/grad_norm", "eval/loss"
_KEYS = frozenset(
    {
        *(_REWARD, _SPREAD, _ZERO_STD, _GROUPS, _TRUNCATED),
        *(_TRUNCATED_REWARD, _ENTROPY, _STEPS, _TEACHER, _HELD_OUT),
        *(_LOSS, _GRAD_NORM, _HELD_OUT_LOSS),
    }
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fault of a training.

    step: at which it was made. text: a sentence with its figures. remedy: what to try.
    """

    name: str
    step: int
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.text} Try: {self.remedy}"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What conditions take from the configuration.

    expert_score, chance_score: of the environment, see `BaseEnv`. compares: the estimator only compares
    siblings. is_untrained: a fresh model without a warm start. eval_episodes: of each evaluation (count).
    """

    expert_score: float = 1.0
    chance_score: float = 0.0
    compares: bool = True
    is_untrained: bool = False
    eval_episodes: int = 256

    @property
    def scale(self) -> float:
        """The distance from chance to the expert."""
        return max(self.expert_score - self.chance_score, _MIN_SPREAD)

    def is_solved(self, reward: float) -> bool:
        """Whether a mean reward is nearly the expert's, so that siblings earn the same for a good reason."""
        return reward >= self.expert_score - SOLVED * self.scale


Row: TypeAlias = dict[str, float]
"""The metrics of one step that conditions read; what was not finite is left out."""


@dataclass(slots=True)
class History:
    """The metrics of all steps so far, by step. not_finite: by metric, the steps at which it was not."""

    rows: dict[int, Row] = field(default_factory=dict)
    not_finite: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add metrics of a step; a later value of one replaces the earlier."""
        values = {name: metrics[name] for name in _KEYS & metrics.keys()}
        finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        self.rows.setdefault(step, {}).update(finite)
        for name in values.keys() - finite.keys():
            self.not_finite[name].append(step)

    def training(self, *names: str) -> list[Row]:
        """The iterations that have all of these metrics, in order."""
        return [row for row in self.rows.values() if all(name in row for name in (_REWARD, *names))]

    def of(self, name: str) -> dict[int, float]:
        """One metric by step, where it was logged and finite."""
        return {step: row[name] for step, row in self.rows.items() if name in row}


class _Trend(NamedTuple):
    """A metric where it was lowest, and in the last iterations; and the reward in both.

    Each is a mean over a window. At the beginning there are fewer iterations: the first one alone is a
    window, for a training may break down in the second.
    """

    low: float
    last: float
    reward_at_low: float
    last_reward: float

    @classmethod
    def of(cls, rows: Sequence[Row], name: str) -> _Trend | None:
        """The trend over these iterations; None = there is none before the last window."""
        if len(rows) <= WINDOW:
            return None
        values, rewards = [row[name] for row in rows], [row[_REWARD] for row in rows]
        earlier = [slice(max(0, end - WINDOW), end) for end in range(1, len(rows) - WINDOW + 1)]
        low, place = min((fmean(values[window]), index) for index, window in enumerate(earlier))
        reward_at_low = fmean(rewards[earlier[place]])
        return cls(low, fmean(values[-WINDOW:]), reward_at_low, fmean(rewards[-WINDOW:]))

    def rises_with_the_reward(self, facts: RunFacts) -> bool:
        """Whether the reward has risen since the metric was lowest."""
        return self.last_reward - self.reward_at_low > REWARD_RISES * facts.scale


def _no_signal(history: History, facts: RunFacts) -> str | None:
    rows = history.training(_ZERO_STD, _STEPS)
    idle = list(takewhile(lambda row: _is_idle(row, facts), reversed(rows)))
    groups = int(sum(row.get(_GROUPS, 0.0) for row in idle))
    if len(idle) < MIN_IDLE_STEPS or groups < MIN_IDLE_GROUPS:
        return None
    reward = fmean(row[_REWARD] for row in idle)
    if facts.is_solved(reward):
        return None
    return (
        f"in all {groups} groups of the last {len(idle)} iterations the siblings earned the same (mean "
        f"reward {reward:.3g}), so no gradient shows the policy what is better."
    )


def _is_idle(row: Row, facts: RunFacts) -> bool:
    """Whether the rewards of an iteration have no signal. A teacher is one of its own."""
    if _TEACHER in row:
        return False
    return row.get(_SPREAD, math.inf) < _MIN_SPREAD or (facts.compares and row[_ZERO_STD] >= 1.0)


def _truncation_pays(history: History, facts: RunFacts) -> str | None:
    rows = history.training(_TRUNCATED)
    trend = _Trend.of(rows, _TRUNCATED)
    if trend is None or trend.last - trend.low < TRUNCATION_GROWS or not trend.rises_with_the_reward(facts):
        return None
    truncated = [row[_TRUNCATED_REWARD] for row in rows[-WINDOW:] if _TRUNCATED_REWARD in row]
    if not truncated or fmean(truncated) < trend.last_reward - _MIN_SPREAD:
        return None
    return (
        f"truncated episodes went from {trend.low:.0%} to {trend.last:.0%}, while the reward rose from "
        f"{trend.reward_at_low:.3g} to {trend.last_reward:.3g}: they earn {fmean(truncated):.3g}, no less "
        "than those that end."
    )


def _entropy_grows(history: History, facts: RunFacts) -> str | None:
    trend = _Trend.of(history.training(_ENTROPY), _ENTROPY)
    if trend is None or trend.rises_with_the_reward(facts):
        return None
    if trend.last < max(ENTROPY_GROWS * trend.low, trend.low + MIN_ENTROPY_GAIN):
        return None
    return (
        f"the entropy rose from {trend.low:.2f} to {trend.last:.2f} nats for each token, while the reward "
        f"went from {trend.reward_at_low:.3g} to {trend.last_reward:.3g}."
    )


def _overfitting(history: History, facts: RunFacts) -> str | None:
    scores = history.of(_HELD_OUT)
    if len(scores) < 2 or not history.training():
        return None
    first, last = min(scores), max(scores)
    gained = _mean_at(history, _REWARD, last) - _mean_at(history, _REWARD, first)
    gap = gained - (scores[last] - scores[first])
    # The variance of a score between 0 and 1 is at most 1/4; this is a difference of two means.
    error = math.sqrt(2 * 0.25 / max(facts.eval_episodes, 1))
    if min(gained, gap) < GAP_GROWS * facts.scale or gap < STANDARD_ERRORS * error * facts.scale:
        return None
    return (
        f"the reward of training has risen by {gained:.3g} since step {first}, while the score on held-out "
        f"tasks went from {scores[first]:.3g} to {scores[last]:.3g}."
    )


def _mean_at(history: History, name: str, step: int) -> float:
    """The mean of a metric over the steps up to this one; of step 0, its first value, of the same weights."""
    values = history.of(name)
    before = [value for at, value in values.items() if step - WINDOW < at <= step]
    return fmean(before) if before else values[min(values)]


def _not_finite(history: History, _: RunFacts) -> str | None:
    broken = sorted({*history.not_finite[_LOSS], *history.not_finite[_GRAD_NORM]})
    if evaluated := history.not_finite[_HELD_OUT_LOSS]:
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
    first = list(islice((row[_LOSS] for row in rows if _LOSS in row), number))
    last = list(islice((row[_LOSS] for row in reversed(rows) if _LOSS in row), number))
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
    losses = history.of(_HELD_OUT_LOSS) if _HELD_OUT_LOSS in next(reversed(history.rows.values()), {}) else {}
    if len(losses) < 2 or not history.of(_LOSS):
        return None
    best, last = min(losses, key=lambda step: losses[step]), max(losses)
    low = losses[best]
    before, after = _mean_at(history, _LOSS, best), _mean_at(history, _LOSS, last)
    if losses[last] < max(low * (1 + LOSS_RISES), low + MIN_LOSS_GAIN) or after >= before:
        return None
    return (
        f"the held-out loss was lowest at step {best} ({low:.3g}), and is {losses[last]:.3g}, while the loss "
        f"of training fell from {before:.3g} to {after:.3g}."
    )


Condition: TypeAlias = Callable[[History, RunFacts], str | None]
"""The sentence of a diagnosis where it holds, else None."""

CONDITIONS: Mapping[str, Condition] = {
    "no-signal": _no_signal,
    "truncation-pays": _truncation_pays,
    "entropy-grows": _entropy_grows,
    "overfitting": _overfitting,
}
SFT_CONDITIONS: Mapping[str, Condition] = {
    "not-finite": _not_finite,
    "loss-flat": _loss_flat,
    "overfitting": _held_out_rises,
}
_WARM_START = "a warm start (warm_start_steps), since the model is fresh and writes noise; "
_REMEDIES: Mapping[str, str] = {
    "no-signal": "easier tasks; rewards for parts of a solution; more episodes of each prompt "
    "(n_samples_per_prompt).",
    "truncation-pays": "rewards that are paid once, at the end, from 0 (`agentrl envs check` finds those "
    "that pay for leaving); higher limits, where good answers are cut. Where lasting is the task, go on.",
    "entropy-grows": "a lower lr, entropy_coef or eps_clip_high; a penalty on the KL to the reference "
    "(use_kl_loss and kl_loss_coef).",
    "overfitting": "more tasks, or more varied ones; fewer iterations (metric_for_best_model keeps the best "
    "checkpoint); a penalty on the KL to the reference (use_kl_loss and kl_loss_coef).",
}
_SFT_REMEDIES: Mapping[str, str] = {
    "not-finite": "a lower sft_lr; more steps of warmup (lr_warmup_iters); float32 in place of bf16.",
    "loss-flat": "a higher sft_lr; a look at what is imitated: the model may write like that already, and a "
    "reply that does not follow from its prompt cannot be learned.",
    "overfitting": "fewer epochs (num_epoch); more conversations, or more varied ones; a lower sft_lr.",
}


@dataclass(slots=True)
class Diagnoses:
    """The diagnoses of a run. It goes on from what is in the folder: a resumed run repeats none.

    folder: of the run. facts: set once they are known. made: those so far. is_supervised: whether the run
    imitates (`agentrl sft`), and plays nothing.
    """

    folder: Path
    facts: RunFacts = field(default_factory=RunFacts)
    made: list[Diagnosis] = field(default_factory=list)
    history: History = field(default_factory=History)
    is_supervised: bool = False

    @classmethod
    def opened(cls, folder: Path, *, is_supervised: bool = False) -> Diagnoses:
        """The diagnoses in the folder of a run, with the history of its metrics."""
        opened = cls(folder, made=read_diagnoses(folder), is_supervised=is_supervised)
        metrics = folder / "metrics.jsonl"
        for record in read_metrics(metrics) if metrics.exists() else ():
            opened.history.add(_step_of(record), record)
        return opened

    def add(self, step: int, metrics: Mapping[str, float]) -> list[Diagnosis]:
        """Add metrics of a step; returns the diagnoses that are made by them.

        A disk that is full costs the file, not the run.
        """
        self.history.add(step, metrics)
        added = list(self._new(step))
        self.made += added
        with suppress(OSError):
            if added:
                lines.append(self.folder / DIAGNOSES, [lines.to_line(asdict(item)) for item in added])
        return added

    def _new(self, step: int) -> Iterator[Diagnosis]:
        names = {diagnosis.name for diagnosis in self.made}
        conditions, remedies = CONDITIONS, _REMEDIES
        if self.is_supervised:
            conditions, remedies = SFT_CONDITIONS, _SFT_REMEDIES
        for name, condition in conditions.items():
            text = None if name in names else condition(self.history, self.facts)
            if text is not None:
                is_noise = name == "no-signal" and self.facts.is_untrained
                yield Diagnosis(name, step, text, (_WARM_START if is_noise else "") + remedies[name])


def read_diagnoses(folder: Path) -> list[Diagnosis]:
    """The diagnoses in the folder of a run, in the order in which they were made.

    Raises:
        RecordError: the file is not as it was written.
    """
    path = folder / DIAGNOSES
    try:
        return TypeAdapter(list[Diagnosis]).validate_python([*lines.read(path)] if path.exists() else [])
    except ValidationError:
        raise RecordError(f"{path} holds no diagnoses of this version") from None


def _step_of(record: Record) -> int:
    return int(record["step"] or 0)
