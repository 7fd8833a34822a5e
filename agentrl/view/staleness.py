"""How old the trained tokens of an asynchronous run were, and how much of the time each side worked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from markupsafe import Markup

from agentrl.records import Record
from agentrl.view.chart import Histogram, draw, draw_histogram, histogram_legend, legend
from agentrl.view.panels import Panel, Series

_OLDEST = "rollout/staleness/max"
_PARTS = {"in flight": "flight", "in the queue": "queue"}
_GROUPS = re.compile(r"rollout/staleness/(?P<part>flight|queue)/groups_(?P<versions>\d+)")
_AGES = {
    **{label: f"rollout/staleness/{part}/mean" for label, part in _PARTS.items()},
    "oldest token": _OLDEST,
}
_WAITING = {"engine": "perf/rollout_wait_time_ratio", "trainer": "perf/wait_time_ratio"}
_BOTH = "perf/overlap_time_ratio"


def figures_of(records: Sequence[Record]) -> Iterator[tuple[Panel | Histogram, Markup, Markup]]:
    """Charts with their pictures and legends; none of a run whose batches all were of the served weights."""
    by_step = {record["step"]: record for record in records if _OLDEST in record}
    # Where a step was logged twice, the later record counts.
    steps = [by_step[step] for step in sorted(step for step in by_step if step is not None)]
    if not steps:
        return
    histogram = Histogram("Staleness of groups", "groups", "versions", _counts(steps))
    if any(histogram.bars.values()):
        yield histogram, draw_histogram(histogram), histogram_legend(histogram)
    ages = [_series(steps, label, key) for label, key in _AGES.items()]
    shares = [_series(steps, label, key, _complement) for label, key in _WAITING.items()]
    shares.append(_series(steps, "both", _BOTH))
    for panel in (
        Panel("Staleness of tokens", "versions", _drawn(ages)),
        Panel("At work", "share of the iteration", _drawn(shares), is_share=True),
    ):
        if panel.series:
            yield panel, draw(panel), legend(panel)


def _counts(steps: Sequence[Record]) -> dict[str, dict[int, int]]:
    """How many groups of all batches (count) were how many versions old, for each part of staleness."""
    counts: dict[str, Counter[int]] = {part: Counter() for part in _PARTS.values()}
    for record in steps:
        for name, value in record.items():
            if (found := _GROUPS.fullmatch(name)) and value is not None:
                counts[found["part"]][int(found["versions"])] += round(value)
    return {label: dict(counts[part]) for label, part in _PARTS.items()}


def _series(steps: Sequence[Record], label: str, key: str, of: Callable[[float], float] = float) -> Series:
    values = ((record["step"] or 0.0, record[key]) for record in steps if key in record)
    return Series(label, tuple((step, None if value is None else of(value)) for step, value in values), key)


def _complement(share: float) -> float:
    return 1.0 - share


def _drawn(curves: Sequence[Series]) -> tuple[Series, ...]:
    """The curves that have a value."""
    return tuple(curve for curve in curves if any(value is not None for _, value in curve.points))
