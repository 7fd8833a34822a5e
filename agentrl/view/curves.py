"""Learning curves of several runs in one figure: each run as a thin line, their mean as a thick one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.records import Record
from agentrl.runtime.extras import require
from agentrl.view.panels import points_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0b5cad", "#c2500a", "#00795c", "#a8437f", "#7a6a00", "#3d87b8", "#5b4bb5", "#5c6670")
_LINES: Sequence[Literal["solid"] | tuple[float, Sequence[float]]] = (
    *("solid", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.2, 1.2, 1.2))),
)
"""Line styles, with strokes and gaps in widths of the line: with eight colours, 32 different lines."""
_INK, _FAINT, _RULE = "#1b1f24", "#59636e", "#e3e7ec"


def plot_curves(
    runs: Mapping[str, Sequence[Record]],
    metrics: Mapping[str, str],
    path: Path,
    *,
    title: str = "",
    x_label: str = "RL iteration",
) -> Path:
    """Draw metrics of runs over their steps and return `path`; its suffix chooses PNG, SVG or PDF.

    metrics: what to draw, {label: metric name}, e.g. {"greedy": "eval/greedy"}. Where all
    values lie between 0 and 1, the axis covers just that range.

    Raises:
        ValueError: no run has any of the metrics.
        MissingExtraError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require("a picture of curves", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    ends: list[tuple[float, float, str, str]] = []
    for index, (label, key) in enumerate(metrics.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        line = _LINES[index // len(_COLOURS) % len(_LINES)]
        curves = [curve for records in runs.values() if (curve := _finite_points(records, key))]
        mean = mean_curve(curves)
        if not mean:
            continue
        for curve in curves if len(curves) > 1 else []:
            axes.plot(list(curve), list(curve.values()), color=colour, linewidth=0.9, alpha=0.35)
        (thick,) = axes.plot(list(mean), list(mean.values()), color=colour, linewidth=2.6)
        thick.set_linestyle(line)
        thick.set_solid_capstyle("round")
        last = max(mean)
        ends.append((mean[last], last, label, colour))
    if not ends:
        raise ValueError(f"none of {list(metrics.values())} stands in any of the runs {list(runs)}")
    _dress(axes, title=title, x_label=x_label)
    _name_ends(axes, sorted(ends))
    figure.savefig(path, dpi=200)
    return path


def mean_curve(curves: Sequence[Mapping[float, float]]) -> dict[float, float]:
    """The mean at each step that every curve has, in order of steps."""
    if not curves:
        return {}
    shared = set(curves[0]).intersection(*curves[1:])
    return {step: sum(curve[step] for curve in curves) / len(curves) for step in sorted(shared)}


def _finite_points(records: Sequence[Record], key: str) -> dict[float, float]:
    return {step: value for step, value in points_of(records, key) if value is not None}


def _dress(axes: Axes, *, title: str, x_label: str) -> None:
    low, high = axes.get_ylim()
    if low >= -0.06 and high <= 1.06:
        axes.set_ylim(-0.02, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    if title:
        axes.set_title(title, loc="left", color=_INK, fontsize=12, fontweight="bold", pad=12)
    axes.set_xlabel(x_label, color=_FAINT)
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.tick_params(colors=_FAINT, length=0)
    axes.margins(x=0.01)


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each label at the end of its curve; labels that would touch are moved apart upwards."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    lowest = low
    for value, step, label, colour in ends:
        y = max(value, lowest)
        lowest = y + gap
        axes.annotate(
            f"{label} {value:.2f}",
            (step, y),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontweight="bold",
            annotation_clip=False,
        )
