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

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import RecordError
from agentrl.records import lines
from agentrl.records.conditions import CONDITIONS, REMEDIES, WARM_START
from agentrl.records.metrics import Record, read_metrics
from agentrl.records.sft_conditions import SFT_CONDITIONS, SFT_REMEDIES
from agentrl.records.trends import History, RunFacts

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
