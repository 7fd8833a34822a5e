"""A line chart or a histogram as SVG, with the colours of the page's style sheet: no script, no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from agentrl.view.panels import MAX_CURVES, Panel, Point, Series
from agentrl.view.scores import figure_text

WIDTH, HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 10, 30
_MAX_POINTS = 400
_MAX_DOTS = 20
Link = Callable[[Series, float], str | None]
"""The address that a point of a curve leads to, by its step; None = it leads nowhere."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """A linear scale from data, [low, high], to coordinates, [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return round(self.start + (value - self.low) / span * (self.end - self.start), 1)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts by whole numbers from 0 on, for each of several kinds.

    unit: of what is counted. axis: the unit of the numbers.
    """

    title: str
    unit: str
    axis: str
    bars: Mapping[str, Mapping[int, int]]


def draw_histogram(histogram: Histogram) -> Markup:
    """The SVG, with a bar of each kind side by side. Every bar has a tooltip; the SVG has a description.

    Raises:
        ValueError: it has no bars.
    """
    kinds = histogram.bars.values()
    highest = max(count for counts in kinds for count in counts.values())
    last = max(number for counts in kinds for number in counts)
    y_ticks = ticks(0.0, float(highest), integers=True)
    across = _Scale(-0.5, last + 0.5, _LEFT, WIDTH - _RIGHT)
    up = _Scale(0.0, y_ticks[-1], HEIGHT - _BOTTOM, _TOP)
    described = "; ".join(
        f"{kind}: " + ", ".join(f"{count} at {number}" for number, count in sorted(counts.items()))
        for kind, counts in histogram.bars.items()
    )
    text = f"{histogram.title} ({histogram.unit} by {histogram.axis}). {described}."
    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(WIDTH, HEIGHT, text),
        *_grid(y_ticks, up),
        *_steps([x for x in ticks(0.0, float(last), integers=True) if x <= last], across, histogram.axis),
        *_bars(histogram, across, up),
    ]
    return Markup("\n").join([*parts, Markup("</svg>")])


def _bars(histogram: Histogram, across: _Scale, up: _Scale) -> Iterator[Markup]:
    width = 0.8 / len(histogram.bars)
    for index, (kind, counts) in enumerate(histogram.bars.items()):
        for number, count in sorted(counts.items()):
            left, right = (across(number - 0.4 + (index + side) * width) for side in (0, 1))
            yield Markup(
                '<rect class="strip s{}" x="{}" y="{}" width="{:.1f}" height="{:.1f}">'
                "<title>{}</title></rect>"
            ).format(
                *(index, left, up(count), right - left, up(0) - up(count)),
                f"{kind} · {number} {histogram.axis}: {count} {histogram.unit}",
            )


def draw(panel: Panel, link: Link | None = None) -> Markup:
    """The panel's SVG. Every point has a tooltip with its numbers; the SVG has a description."""
    xs = [x for series in panel.series for x, _ in series.points]
    ys = [y for series in panel.series for _, y in series.points if y is not None]
    y_ticks = ticks(0.0, 1.0) if panel.is_share else ticks(min(0.0, *ys), max(ys))
    x_ticks = ticks(min(xs), max(xs), integers=True)
    across = _Scale(min(xs), max(*xs, min(xs) + 1), _LEFT, WIDTH - _RIGHT)
    up = _Scale(y_ticks[0], y_ticks[-1], HEIGHT - _BOTTOM, _TOP)
    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="{}" aria-label="{}">').format(
            # Links inside of an image would be hidden from screen readers.
            *(WIDTH, HEIGHT, "img" if link is None else "group", describe(panel))
        ),
        *_grid(y_ticks, up),
        *_steps([x for x in x_ticks if across.low <= x <= across.high], across),
    ]
    for index, series in enumerate(panel.series):
        parts += _curve(index, series, across, up, link)
    return Markup("\n").join([*parts, Markup("</svg>")])


def describe(panel: Panel) -> str:
    """The panel as text, for screen readers."""
    curves = []
    for series in panel.series:
        values = [f"{figure_text(y)} at step {x:g}" for x, y in series.points if y is not None]
        curves.append(f"{series.label}: {values[0]}, {values[-1]}")
    return f"{panel.title} ({panel.unit}). {'; '.join(curves)}."


def ticks(low: float, high: float, *, integers: bool = False) -> tuple[float, ...]:
    """Three to seven round numbers, evenly spaced, that enclose [low, high]. integers: no fractions."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-30):
        high = low + (size if size > 1e-30 else 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    if integers:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(float(f"{k * step:.10g}") for k in range(first, last + 1))


def _grid(values: Sequence[float], up: _Scale) -> Iterator[Markup]:
    for value in values:
        y = up(value)
        style = "axis" if value == 0 else "grid"
        yield Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            style, _LEFT, WIDTH - _RIGHT, y, y
        )
        yield Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            _LEFT - 6, y + 3.5, _short(value)
        )


def _steps(values: Sequence[float], across: _Scale, unit: str = "step") -> Iterator[Markup]:
    for value in values:
        yield Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            across(value), HEIGHT - _BOTTOM + 15, _short(value)
        )
    yield Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
        WIDTH - _RIGHT, HEIGHT - 2, unit
    )


def _curve(index: int, series: Series, across: _Scale, up: _Scale, link: Link | None) -> Iterator[Markup]:
    points = _thinned(series.points)
    path = _path(points, across, up)
    yield Markup('<path class="curve {}" d="{}"/>').format(_style(index), path)
    dots = [(x, y) for x, y in points if y is not None]
    size = 2.6 if len(dots) <= _MAX_DOTS else 0
    for x, y in dots:
        point = Markup(
            '<g class="point s{}"><circle class="dot" cx="{}" cy="{}" r="{}"/>'
            '<circle class="reach" cx="{}" cy="{}" r="7"><title>{}</title></circle></g>'
        ).format(
            index % MAX_CURVES,
            across(x), up(y), size, across(x), up(y),
            f"step {x:g} · {series.label}: {figure_text(y)}",
        )  # fmt: skip
        address = None if link is None else link(series, x)
        yield point if address is None else Markup('<a href="{}">{}</a>').format(address, point)


def _style(index: int) -> str:
    """The classes of a curve: a colour and dashes, a pair that none of the 63 curves before it has."""
    return f"s{index % MAX_CURVES} d{(index + index // MAX_CURVES) % MAX_CURVES}"


def _path(points: Sequence[Point], across: _Scale, up: _Scale) -> str:
    parts, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
            continue
        parts.append(f"{pen}{across(x)} {up(y)}")
        pen = "L"
    return " ".join(parts)


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """About _MAX_POINTS evenly spaced points at most; the last one is always included."""
    stride = math.ceil(len(points) / _MAX_POINTS)
    return points if stride <= 1 else [*points[:-1:stride], points[-1]]


def _short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def legend(panel: Panel) -> Markup:
    """The names of the curves with a sample of each line; empty where there is only one curve."""
    if len(panel.series) < 2:
        return Markup()
    line = Markup('<path class="curve {}" d="M1 4 L21 4"/>')
    samples = ((each.label, each.key, line.format(_style(n))) for n, each in enumerate(panel.series))
    return _legend(samples)


def histogram_legend(histogram: Histogram) -> Markup:
    """The kinds with the colour of each."""
    bar = Markup('<rect class="strip s{}" width="22" height="8"/>')
    return _legend((kind, "", bar.format(index)) for index, kind in enumerate(histogram.bars))


def _legend(samples: Iterable[tuple[str, str, Markup]]) -> Markup:
    """Names in one line each, with a sample of how it is drawn; a tooltip has the whole name and metric."""
    item = Markup(
        '<li title="{}"><svg class="key" viewBox="0 0 22 8" aria-hidden="true">{}</svg><span>{}</span></li>'
    )
    items = [
        item.format(name if key in ("", name) else f"{name}: {key}", sample, name)
        for name, key, sample in samples
    ]
    return Markup('<ul class="legend">{}</ul>').format(Markup().join(items))
