"""The results of runs, as the Python API returns them and a notebook shows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.evaluation.report import EvalReport
from agentrl.records import Record, read_metrics
from agentrl.records.diagnoses import Diagnosis
from agentrl.records.history import METRICS
from agentrl.run.stages import StageTime
from agentrl.view.result import ShownResult
from agentrl.view.scores import time_text


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run of `agentrl train`. A notebook shows the scores of every milestone, and the curves.

    reports: by milestone ("before", "after warm start", "after RL", ...), then by mode
    (sampled, greedy), of a named set of prompts by NAME/MODE. stages: with their durations. diagnoses: faults
    of the training, in the order in which they showed.
    """

    folder: Path
    env_id: str
    reports: Mapping[str, Mapping[str, EvalReport]]
    stages: tuple[StageTime, ...]
    diagnoses: tuple[Diagnosis, ...] = ()

    @property
    def metrics(self) -> list[Record]:
        """The metrics of every step by name, as in metrics.jsonl; empty where no step was finished."""
        return _metrics(self.folder)

    def _repr_html_(self) -> str:
        """The result as a notebook shows it."""
        by_milestone = {
            milestone: {
                label: text
                for mode, report in reports.items()
                for label, text in ((f"{mode}, {name}", text) for name, text in report.scores().items())
            }
            for milestone, reports in self.reports.items()
        }
        labels = dict.fromkeys(label for scores in by_milestone.values() for label in scores)
        return ShownResult(
            title=self.folder.name,
            facts={
                "environment": self.env_id,
                "time": time_text(sum(stage.wall_s for stage in self.stages)),
                "page": str(self.folder / "report.html"),
                **_shown(self.diagnoses),
            },
            columns=tuple(by_milestone),
            lines=[(label, [scores.get(label, "–") for scores in by_milestone.values()]) for label in labels],
            records=self.metrics,
        ).html()


@dataclass(frozen=True, slots=True)
class SftResult:
    """The result of a run of `agentrl sft`.

    losses: on held-out conversations, by step (mean of - logprob over their loss tokens, nats). taken:
    conversations and episodes that were imitated (count); left_out: the number of the others, by reason.
    diagnoses: faults of the training, in the order in which they showed.
    """

    folder: Path
    steps: int
    losses: Mapping[int, float]
    taken: int
    left_out: Mapping[str, int]
    diagnoses: tuple[Diagnosis, ...] = ()

    @property
    def metrics(self) -> list[Record]:
        """The metrics of every step by name, as in metrics.jsonl; empty where no step was finished."""
        return _metrics(self.folder)

    def _repr_html_(self) -> str:
        """The result as a notebook shows it."""
        facts = {"steps": f"{self.steps:,}", "imitated": f"{self.taken:,}"}
        facts |= {f"left out, {reason}": f"{number:,}" for reason, number in self.left_out.items()}
        facts |= _shown(self.diagnoses)
        losses = [(f"held-out loss, step {step:,}", (f"{loss:.3f}",)) for step, loss in self.losses.items()]
        return ShownResult(self.folder.name, facts, lines=losses, records=self.metrics).html()


def _shown(diagnoses: Iterable[Diagnosis]) -> dict[str, str]:
    return {diagnosis.name: f"{diagnosis.text} Try: {diagnosis.remedy}" for diagnosis in diagnoses}


def _metrics(folder: Path) -> list[Record]:
    path = folder / METRICS
    return read_metrics(path) if path.exists() else []
