"""The page of a run that goes on: its status, its diagnoses and its curves, read from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.records import Record
from agentrl.records.diagnoses import Diagnosis
from agentrl.view.chart import draw, legend
from agentrl.view.panels import panels_of
from agentrl.view.report import render_page


@dataclass(frozen=True, slots=True)
class LivePage:
    """What the page shows. status: lines of text. reload_s: a browser reads it again after (0 = never)."""

    title: str
    status: Sequence[str]
    records: Sequence[Record]
    diagnoses: Sequence[Diagnosis]
    reload_s: int

    def html(self) -> str:
        """The page, without scripts or other files."""
        return render_page(
            "live.html",
            title=self.title,
            status=self.status,
            diagnoses=[str(diagnosis) for diagnosis in self.diagnoses],
            panels=[(panel, draw(panel), legend(panel)) for panel in panels_of(self.records)],
            reload_s=self.reload_s,
        )
