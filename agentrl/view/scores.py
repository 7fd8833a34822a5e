"""The table of scores: how good the policy was at each point of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Figure = float | int | str


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """The policy at one point of a run, e.g. "after warm start". None = not measured."""

    stage: str
    scores: Mapping[str, float | None]


def columns_of(rows: Sequence[ScoreRow]) -> tuple[str, ...]:
    """Every score that some row has, in the order of first mention."""
    return tuple(dict.fromkeys(name for row in rows for name in row.scores))


def score_text(value: float | None) -> str:
    """Three decimals, or a dash where nothing was measured."""
    return "–" if value is None else f"{value:z.3f}"


def figure_text(value: Figure) -> str:
    """A number in readable form: 12,345 or 0.512 or 3.2e-05; text unchanged."""
    if isinstance(value, str):
        return value
    size = abs(value)
    if isinstance(value, int) or size >= 1000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:z.3f}" if size >= 0.001 or size == 0 else f"{value:.1e}"


def size_text(num_bytes: int) -> str:
    """A number of bytes: 812 B, 3.4 kB, 1.6 GB; k is 1,000."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"


def time_text(seconds: float) -> str:
    """A span of time: 4 s, 1 min 05 s, 2 h 03 min."""
    rounded = round(max(seconds, 0.0))
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60:02d} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60:02d} min"
