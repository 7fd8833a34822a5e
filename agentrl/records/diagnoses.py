"""What goes wrong in a training, read from the history of its metrics.

A diagnosis is a condition over the steps so far, a sentence with its figures, and what to try. It is made
once, at the first step at which its condition holds: printed, appended to diagnoses.jsonl in the run's
folder, listed in summary.json and shown in the report. Nothing acts on it: no decision reads a metric.
`conditions` has those of RL, `sft_conditions` those of `agentrl sft`.

Trends compare means over windows of iterations, so a single batch decides nothing. Rewards are compared on
the scale of the environment, from chance_score to expert_score. `tests/records/test_diagnoses.py` checks that
none holds on the recorded metrics of healthy runs, and each on those of a run with its fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import RecordError
from agentrl.records import lines
from agentrl.records.conditions import CONDITIONS, REMEDIES, STANDARD_ERRORS, WARM_START, Condition
from agentrl.records.metrics import Record, read_metrics
from agentrl.records.trends import GRAD_NORM, HELD_OUT_LOSS, LOSS, MetricHistory, RunFacts, mean_at

# The faults of a supervised training, as conditions over the history of its metrics.
#
# not-finite         gradients of several steps, or the held-out loss, are not finite numbers
# loss-flat          the loss of training does not fall
# overfitting        the held-out loss rises again, and the loss of training still falls
MIN_BROKEN_STEPS = 3
"""Optimizer steps whose gradients are not finite. A single one is discarded, and costs one batch."""
MIN_FLAT_STEPS, MAX_FLAT_STEPS = 20, 100
"""Steps at the beginning and at the end that are compared: half of all so far, within these bounds."""
LOSS_FALLS = 1e-4
"""A share of the loss at the beginning, for each of these steps: one that certainly fell by less is flat."""
LOSS_RISES, MIN_LOSS_GAIN = 0.1, 0.02
"""By how much the held-out loss is above its lowest value: a share of it, and nats for each token."""


def _not_finite(history: MetricHistory, _: RunFacts) -> str | None:
    broken = sorted({*history.not_finite[LOSS], *history.not_finite[GRAD_NORM]})
    if evaluated := history.not_finite[HELD_OUT_LOSS]:
        return f"the held-out loss of step {evaluated[0]} is not a finite number."
    if len(broken) < MIN_BROKEN_STEPS:
        return None
    return (
        f"the gradients of {len(broken)} steps, first of step {broken[0]}, were not finite numbers, and were "
        "discarded."
    )


def _loss_flat(history: MetricHistory, _: RunFacts) -> str | None:
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


def _held_out_rises(history: MetricHistory, _: RunFacts) -> str | None:
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


DIAGNOSES = "diagnoses.jsonl"
"""The file in the run's folder."""


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


@dataclass(slots=True)
class Diagnoses:
    """The diagnoses of a run. It goes on from what is in the folder: a resumed run repeats none.

    folder: of the run. facts: set once they are known. made: those so far. is_supervised: whether the run
    imitates (`agentrl sft`), and plays nothing.
    """

    folder: Path
    facts: RunFacts = field(default_factory=RunFacts)
    made: list[Diagnosis] = field(default_factory=list)
    history: MetricHistory = field(default_factory=MetricHistory)
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
        conditions, remedies = CONDITIONS, REMEDIES
        if self.is_supervised:
            conditions, remedies = SFT_CONDITIONS, SFT_REMEDIES
        for name, condition in conditions.items():
            text = None if name in names else condition(self.history, self.facts)
            if text is not None:
                is_noise = name == "no-signal" and self.facts.is_untrained
                yield Diagnosis(name, step, text, (WARM_START if is_noise else "") + remedies[name])


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
