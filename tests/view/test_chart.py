import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentrl.view
from agentrl.view.chart import HEIGHT, WIDTH, describe, draw, legend, ticks
from agentrl.view.panels import Panel, Series, overlaid, panels_of, points_of
from tests.view.synthetic import RECORDS, Page

NUMBERS = st.floats(-1e9, 1e9).map(lambda x: float(f"{x:.6g}"))


def panel(*points, is_share=False):
    return Panel("Reward", "per episode", (Series("reward", points),), is_share)


@given(NUMBERS, NUMBERS)
def test_ticks_are_few_even_and_enclose_the_data(a, b):
    low, high = sorted((a, b))
    values = ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert values[0] <= low + slack
    assert values[-1] >= high - slack
    assert 2 <= len(values) <= 7
    steps = [y - x for x, y in pairwise(values)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-3) for step in steps)


def test_ticks_are_round():
    assert ticks(0, 1) == (0, 0.25, 0.5, 0.75, 1)
    assert ticks(0, 37.2) == (0, 10, 20, 30, 40)
    assert ticks(0, 3, integers=True) == (0, 1, 2, 3)


def coordinates(svg):
    path = re.search(r' d="([^"]*)', svg)[1]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def test_higher_values_are_drawn_higher_and_later_steps_further_right():
    points = coordinates(draw(panel((0, 0.0), (5, 0.5), (10, 1.0), is_share=True)))
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x0 < x1 < x2 <= WIDTH
    assert HEIGHT > y0 > y1 > y2 >= 0
    assert math.isclose(x1 - x0, x2 - x1, abs_tol=0.11)
    assert math.isclose(y0 - y1, y1 - y2, abs_tol=0.11)


def test_points_are_links_where_they_lead_somewhere():
    series = Series("a", ((0, 1.0), (1, 2.0)), "rollout/a")
    svg = draw(Panel("x", "y", (series,)), lambda curve, x: f"{curve.key}?<{x}>" if x else None)
    links = [attributes["href"] for attributes in Page(svg).attributes if "href" in attributes]
    assert links == ["rollout/a?<1>"]
    assert "<a" not in draw(Panel("x", "y", (series,)))


def test_a_missing_value_is_a_gap():
    svg = draw(panel((0, 1.0), (1, None), (2, 3.0), (3, 4.0)))
    path = re.search(r' d="([^"]*)', svg)[1]
    assert [part[0] for part in path.split(" ") if part[0] in "ML"] == ["M", "M", "L"]


def test_a_point_has_a_tooltip_with_its_numbers():
    page = Page(draw(panel((0, 0.25), (4, 0.5))))
    titles = [text for tag, text in zip(page.tags, page.texts, strict=True) if tag == "title"]
    assert titles == ["step 0 · reward: 0.250", "step 4 · reward: 0.500"]


@pytest.mark.parametrize("points", [[(3, 2.0)], [(0, 0.0), (1, 0.0)], [(0, -5.0), (1, -5.0)]])
def test_flat_and_single_points_are_drawn(points):
    for x, y in coordinates(draw(panel(*points))):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT


def test_a_long_run_is_thinned_and_keeps_its_end():
    svg = draw(panel(*[(k, float(k)) for k in range(5001)]))
    assert len(coordinates(svg)) <= 402
    assert "step 5000 · reward: 5,000" in svg


def test_a_chart_has_a_text_description():
    assert describe(panel((0, 0.25), (3, None), (4, 0.5))) == (
        "Reward (per episode). reward: 0.250 at step 0, 0.500 at step 4."
    )


def test_curves_differ_in_dashes_and_colour():
    two = Panel("x", "y", (Series("a", ((0, 1.0),)), Series("<b>", ((0, 2.0),))))
    assert "s0" in draw(two)
    assert "s1" in draw(two)
    assert "&lt;b&gt;" in legend(two)
    assert legend(panel((0, 1.0))) == ""


def test_panels_exist_for_logged_metrics_only():
    panels = {p.title: p for p in panels_of(RECORDS)}
    assert list(panels) == [
        "Success on held-out tasks",
        "Held-out success by hops, greedy",
        "Reward in training",
        "Gradient norm",
        "Time per stage",
    ]
    success = panels["Success on held-out tasks"]
    assert [s.label for s in success.series] == ["sampled", "greedy"]
    assert success.is_share
    assert [s.label for s in panels["Held-out success by hops, greedy"].series] == ["2"]


def test_parts_have_a_chart_for_each_mode_and_set():
    names = [f"eval/{mode}/{part}" for mode in ("sampled", "first/greedy") for part in ("hops=1", "hops=a/b")]
    parts = [panel for panel in panels_of([dict.fromkeys(["step", *names], 0.5)]) if " by " in panel.title]
    assert [(panel.title, [s.label for s in panel.series]) for panel in parts] == [
        ("Held-out success by hops, first, greedy", ["1", "a/b"]),
        ("Held-out success by hops, sampled", ["1", "a/b"]),
    ]
    titles = [panel.title for panel in overlaid({"a": [{"step": 0, names[0]: 0.5, names[1]: 0.5}]})]
    assert titles == ["Held-out success by hops, sampled: 1", "Held-out success by hops, sampled: a/b"]


@pytest.mark.parametrize(("number", "sizes"), [(8, [8]), (9, [4, 5]), (20, [6, 7, 7])])
def test_no_chart_has_more_curves_than_can_be_told_apart(number, sizes):
    record = {"step": 0, **{f"eval/greedy/kind=k{n:02}": n / 20 for n in range(number)}}
    panels = panels_of([record])
    assert [len(panel.series) for panel in panels] == sizes
    assert [s.label for panel in panels for s in panel.series] == [f"k{n:02}" for n in range(number)]
    assert len({panel.title for panel in panels}) == len(sizes)


def test_many_runs_in_one_chart_have_curves_that_differ():
    (panel,) = overlaid({f"run {n}": [{"step": 0, "eval/greedy": n / 64}] for n in range(64)})
    styles = re.findall(r'class="curve s(\d) d(\d)"', draw(panel))
    assert len(styles) == len(set(styles)) == 64
    assert re.findall(r'class="curve s(\d) d(\d)"', legend(panel)) == styles
    # A run alone with its colour keeps the line that it had: the first eight differ in both.
    assert styles[:8] == [(f"{n}", f"{n}") for n in range(8)]
    css = (Path(agentrl.view.__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"\.curve\.s(\d) { stroke: var\(--s(\d)\); }", css))
    assert colours == {f"{n}": f"{n}" for n in range(8)}
    assert all(len(set(re.findall(rf"--s{n}: (#\w+)", css))) == 2 for n in range(8)), "light and dark"
    dashes = dict(re.findall(r"\.curve\.d(\d) { stroke-dasharray: ([\d ]+); }", css))
    assert len({*dashes}) == len({*dashes.values()}) == 7


def test_scores_above_one_do_not_outgrow_the_chart():
    (shares,) = panels_of([{"step": 0, "eval/greedy": 1.0}])
    (scores,) = panels_of([{"step": 0, "eval/greedy": 1.2}])
    assert (shares.is_share, shares.unit) == (True, "share of episodes")
    assert (scores.is_share, scores.unit) == (False, "mean score")
    assert all(0 <= y <= HEIGHT for _, y in coordinates(draw(scores)))


def test_tools_agents_and_parts_of_the_reward_have_charts():
    names = [
        *("rollout/raw_reward", "rollout/raw_reward/solver", "rollout/reward/brevity/mean"),
        *("rollout/tool/find/calls/mean", "rollout/tool/find/latency_ms", "rollout/tool/find/timeouts/mean"),
        *("rollout/tool/find/rejected/type/mean", "rollout/tool/find/coerced/mean", "rollout/turns/mean"),
    ]
    panels = {p.title: [s.label for s in p.series] for p in panels_of([dict.fromkeys(["step", *names], 1.0)])}
    assert panels == {
        "Reward in training": ["all agents", "solver"],
        "Reward by part": ["brevity"],
        "Turns": ["turns"],
        "Calls of tools": ["find"],
        "Calls that went wrong": ["find, timeouts", "find, rejected: type"],
        "Latency of tools": ["find"],
    }


def test_of_a_step_logged_twice_the_later_value_counts():
    assert points_of(RECORDS, "eval/sampled") == ((0, 0.25), (2, 0.9))


def test_points_come_in_the_order_of_steps():
    assert points_of([{"step": 2, "a": 1.0}, {"step": 1, "a": None}], "a") == ((1, None), (2, 1.0))


def test_a_metric_that_is_never_finite_has_no_chart():
    assert panels_of([{"step": 0, "train/grad_norm": None}]) == ()
