"""The result of a call as a notebook shows it: a piece of HTML with a table and curves, without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from markupsafe import Markup

from agentrl.records import Record
from agentrl.view.chart import draw, legend
from agentrl.view.panels import panels_of
from agentrl.view.report import render_page

_STYLE = Path(__file__).parent / "templates" / "report.css"
_MAX_PANELS = 6


@dataclass(frozen=True, slots=True)
class ShownResult:
    """What is shown of a result.

    title: above it. facts: one line of names and values. columns: the headings of the table's cells. lines:
    the table, a name and a text for each column. records: the metrics that curves are drawn of.
    """

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ()
    lines: Sequence[tuple[str, Sequence[str]]] = ()
    records: Sequence[Record] = ()

    def html(self) -> str:
        """The HTML; every text in it is escaped."""
        panels = panels_of(self.records)
        return render_page(
            "result.html",
            style=_style(),
            result=self,
            panels=[(panel, draw(panel), legend(panel)) for panel in panels[:_MAX_PANELS]],
            more=len(panels[_MAX_PANELS:]),
        )


@cache
def _style() -> Markup:
    """The style of a run's page, for what is inside of an element of the class `agentrl` alone."""
    rules = _STYLE.read_text(encoding="utf-8").replace(":root", "&")
    return Markup(f".agentrl {{\n{rules}}}")
