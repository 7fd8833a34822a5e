import math
import re

import pytest

from agentrl.view.curves import mean_curve, plot_curves


def runs(n=3):
    return {
        f"seed {k}": [
            {"step": s, "eval/sampled": 1 - math.exp(-s / (5 + k)), "eval/greedy": None if s == 5 else 0.5}
            for s in range(0, 21, 5)
        ]
        for k in range(n)
    }


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_chooses_the_format(tmp_path, suffix, magic):
    metrics = {"sampled": "eval/sampled", "greedy": "eval/greedy", "absent": "eval/absent"}
    path = plot_curves(runs(), metrics, tmp_path / f"curves.{suffix}", title="Five [seeds]")
    assert path.read_bytes().startswith(magic)


def drawn(tmp_path, monkeypatch, *args, **kwargs):
    """The lines of a figure: (width, x values, y values)."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, dpi: figures.append(self))
    plot_curves(*args, tmp_path / "x.png", **kwargs)
    axes = figures[0].axes[0]
    lines = [(line.get_linewidth(), list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]
    return lines, [text.get_text() for text in axes.texts], axes


def test_each_run_is_a_thin_line_and_their_mean_a_thick_one(tmp_path, monkeypatch):
    all_runs = runs()
    lines, texts, axes = drawn(tmp_path, monkeypatch, all_runs, {"sampled": "eval/sampled"})
    widths = [width for width, _, _ in lines]
    assert len(lines) == 4
    assert all(width < widths[-1] for width in widths[:-1])
    last = [records[-1]["eval/sampled"] for records in all_runs.values()]
    assert math.isclose(lines[-1][2][-1], sum(last) / 3)
    assert texts == [f"sampled {sum(last) / 3:.2f}"]
    assert axes.get_xlabel() == "RL iteration"
    assert axes.get_ylim() == (-0.02, 1.02)


def test_a_single_run_is_one_line_without_missing_values(tmp_path, monkeypatch):
    lines, _, _ = drawn(tmp_path, monkeypatch, runs(1), {"greedy": "eval/greedy"})
    assert [x for _, x, _ in lines] == [[0, 10, 15, 20]]


def test_thirty_two_curves_differ_in_colour_or_dashes(tmp_path):
    names = [f"eval/{n}" for n in range(32)]
    records = {"run": [{"step": step, **dict.fromkeys(names, 0.5)} for step in (0, 1)]}
    picture = plot_curves(records, {name: name for name in names}, tmp_path / "many.svg").read_text()
    styles = [style for style in re.findall(r'style="([^"]*)"', picture) if "stroke-width: 2.6" in style]
    assert len(styles) == len(set(styles)) == 32
    assert len({re.search(r"stroke: (#\w+)", style)[1] for style in styles[:8]}) == 8
    assert not any("stroke-dasharray" in style for style in styles[:8])


def test_labels_of_curves_that_end_together_do_not_touch(tmp_path, monkeypatch):
    _, _, axes = drawn(tmp_path, monkeypatch, runs(1), {"a": "eval/greedy", "b": "eval/greedy"})
    first, second = (text.xy[1] for text in axes.texts)
    assert second - first > 0.04


def test_the_mean_is_taken_where_every_run_has_a_value():
    assert mean_curve([{0: 1.0, 1: 2.0, 2: 5.0}, {1: 4.0, 0: 3.0}]) == {0: 2.0, 1: 3.0}
    assert mean_curve([]) == {}


def test_metrics_that_no_run_logged_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none of \['eval/x'\] stands in any of the runs \['seed 0'\]"):
        plot_curves(runs(1), {"x": "eval/x"}, tmp_path / "x.png")
