"""When each side of a run worked, as SVG: a row for each kind of work, darker the more of the time it did.

The last iterations also have a row for each process besides the run's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from markupsafe import Markup

from agentrl.records.timeline import Timeline
from agentrl.runtime.activity import KINDS
from agentrl.view.chart import ticks
from agentrl.view.scores import time_text

COLUMNS = 480
NUM_LAST = 4
"""The iterations of the second picture."""
_LEFT, _WIDTH, _RIGHT, _ROW, _BAR, _AXIS = 80, 2 * COLUMNS, 50, 20, 14, 26
_LEVELS = 8
_MAX_PROCESSES, _MAX_NAME = 32, 12
"""Rows of processes, of a large run the first (count), and their names (characters)."""


def pictures(timeline: Timeline) -> list[tuple[str, Markup]]:
    """The pictures of a run, with their titles: all of it, and its last iterations."""
    window = timeline.last(NUM_LAST)
    whole = [("All of the run", _draw(timeline, None))] if timeline.now_s > timeline.began_s else []
    if window is None or not whole:
        return whole
    return [*whole, ("The last iterations", _draw(timeline, window))]


def _draw(timeline: Timeline, window: tuple[float, float] | None) -> Markup:
    rows = {kind: timeline.columns(kind, COLUMNS, window) for kind in KINDS}
    if window is not None:
        processes = timeline.processes[:_MAX_PROCESSES]
        rows |= {name: timeline.columns_of(name, COLUMNS, window) for name in processes}
    rows = {name: shares for name, shares in rows.items() if any(shares)}
    start_s, end_s = window or (timeline.began_s, timeline.now_s)
    height = _ROW * len(rows) + _AXIS
    means = {name: sum(shares) / COLUMNS for name, shares in rows.items()}
    described = ", ".join(f"{name} {mean:.0%}" for name, mean in means.items())
    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            _LEFT + _WIDTH + _RIGHT, height, f"Share of {time_text(end_s - start_s)} at work: {described}."
        ),
        *_axis(start_s - timeline.began_s, end_s - timeline.began_s, height),
    ]
    for number, (name, shares) in enumerate(rows.items()):
        parts += _strip(name, shares, number * _ROW, means[name])
    return Markup("\n").join([*parts, Markup("</svg>")])


def _strip(name: str, shares: Sequence[float], top: int, mean: float) -> Iterator[Markup]:
    color = f"s{KINDS.index(name)}" if name in KINDS else "process"
    text = Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>')
    yield text.format(_LEFT - 8, top + _BAR - 2, "end", name[:_MAX_NAME])
    yield text.format(_LEFT + _WIDTH + 8, top + _BAR - 2, "start", f"{mean:.0%}")
    column = 0
    for level, equal in groupby(-(-share * _LEVELS // 1) for share in shares):
        width = len(list(equal))
        if level:
            yield Markup(
                '<rect class="strip {}" x="{}" y="{}" width="{}" height="{}" opacity="{:g}"/>'
            ).format(color, _LEFT + 2 * column, top, 2 * width, _BAR, level / _LEVELS)
        column += width


def _axis(start_s: float, end_s: float, height: int) -> Iterator[Markup]:
    """Lines at round times since the run began."""
    seconds = max(end_s - start_s, 1e-9)
    for at_s in ticks(start_s, end_s):
        x = round(_LEFT + (at_s - start_s) / seconds * _WIDTH, 1)
        if _LEFT <= x <= _LEFT + _WIDTH:
            yield Markup('<line class="grid" x1="{}" x2="{}" y1="0" y2="{}"/>').format(x, x, height - _AXIS)
            label = time_text(at_s) if seconds >= 20 else f"{at_s:g} s"
            yield Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
                x, height - _AXIS + 15, label
            )
