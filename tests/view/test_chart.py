import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.view.chart import HEIGHT, WIDTH, describe, draw, legend, ticks
from agentrl.view.panels import Panel, Series, panels_of, points_of
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
    assert titles == ["step 0 · reward 0.250", "step 4 · reward 0.500"]


@pytest.mark.parametrize("points", [[(3, 2.0)], [(0, 0.0), (1, 0.0)], [(0, -5.0), (1, -5.0)]])
def test_flat_and_single_points_are_drawn(points):
    for x, y in coordinates(draw(panel(*points))):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT


def test_a_long_run_is_thinned_and_keeps_its_end():
    svg = draw(panel(*[(k, float(k)) for k in range(5001)]))
    assert len(coordinates(svg)) <= 402
    assert "step 5000 · reward 5,000" in svg


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
        "Held-out success by kind of task",
        "Reward in training",
        "Gradient norm",
        "Time per stage",
    ]
    success = panels["Success on held-out tasks"]
    assert [s.label for s in success.series] == ["sampled", "greedy"]
    assert success.is_share
    assert [s.label for s in panels["Held-out success by kind of task"].series] == ["greedy, hops=2"]


def test_of_a_step_logged_twice_the_later_value_counts():
    assert points_of(RECORDS, "eval/sampled") == ((0, 0.25), (2, 0.9))


def test_points_come_in_the_order_of_steps():
    assert points_of([{"step": 2, "a": 1.0}, {"step": 1, "a": None}], "a") == ((1, None), (2, 1.0))


def test_a_metric_that_is_never_finite_has_no_chart():
    assert panels_of([{"step": 0, "train/grad_norm": None}]) == ()
