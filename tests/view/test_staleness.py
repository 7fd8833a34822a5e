"""The section of a report on how old tokens were: its figures, their numbers, and when it is left out."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from agentrl.view.report import figures_of, render_report, write_report
from tests.view.synthetic import RECORDS, Page, report

BAR = re.compile(
    r'<rect class="strip s(\d)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)">'
    "<title>([^<]+)</title>"
)
HEADING = "How old the tokens were"


def record(step, *, flight, queue, oldest, **shares):
    """A batch, with the groups by versions of each part."""
    counts = {
        f"rollout/staleness/{part}/groups_{versions}": float(number)
        for part, by_versions in (("flight", flight), ("queue", queue))
        for versions, number in by_versions.items()
    }
    means = {
        f"rollout/staleness/{part}/mean": sum(v * n for v, n in by.items()) / sum(by.values())
        for part, by in (("flight", flight), ("queue", queue))
    }
    worked = {f"perf/{name}_ratio": share for name, share in shares.items()}
    return {"step": step, "time_s": 1.0, "rollout/staleness/max": oldest, **means, **counts, **worked}


LATE = [
    record(1, flight={0: 4}, queue={0: 4}, oldest=0.0, rollout_wait_time=0.25, wait_time=0.5),
    record(2, flight={0: 1, 2: 3}, queue={1: 4}, oldest=3.0, rollout_wait_time=0.0, wait_time=0.125),
]
LATE[1]["perf/overlap_time_ratio"] = 0.75


def bars(picture):
    """The tooltip of each bar, with its colour, its left and right edge, and its height."""
    return {
        title: (int(index), float(x), float(x) + float(width), float(height))
        for index, x, _, width, height, title in BAR.findall(str(picture))
    }


def curves(panel):
    return {series.label: series.points for series in panel.series}


def test_the_histogram_has_the_groups_of_all_batches_in_flight_and_in_the_queue():
    (histogram, picture, names), *_ = figures_of(LATE)
    assert histogram.bars == {"in flight": {0: 5, 2: 3}, "in the queue": {0: 4, 1: 4}}
    drawn = bars(picture)
    assert list(drawn) == [
        *("in flight · 0 versions: 5 groups", "in flight · 2 versions: 3 groups"),
        *("in the queue · 0 versions: 4 groups", "in the queue · 1 versions: 4 groups"),
    ]
    edges = sorted((left, right) for _, left, right, _ in drawn.values())
    assert all(right <= left for (_, right), (left, _) in pairwise(edges))
    unit = drawn["in flight · 0 versions: 5 groups"][3] / 5
    for title, (index, _, _, height) in drawn.items():
        assert height == pytest.approx(unit * int(title.split()[-2]), abs=0.1)
        assert index == title.startswith("in the queue")
    label = ET.fromstring(str(picture)).get("aria-label")
    assert label == (
        "Staleness of groups (groups by versions). in flight: 5 at 0, 3 at 2; in the queue: 4 at 0, 4 at 1."
    )
    assert re.findall(r"</svg><span>([^<]+)</span></li>", str(names)) == ["in flight", "in the queue"]


def test_means_of_each_step_and_the_share_in_which_each_side_worked():
    _, (ages, _, _), (worked, _, _) = figures_of(LATE)
    assert curves(ages) == {
        "in flight": ((1, 0.0), (2, 1.5)),
        "in the queue": ((1, 0.0), (2, 1.0)),
        "oldest token": ((1, 0.0), (2, 3.0)),
    }
    assert worked.is_share
    assert curves(worked) == {
        "engine": ((1, 0.75), (2, 1.0)),
        "trainer": ((1, 0.5), (2, 0.875)),
        "both": ((2, 0.75),),
    }


def test_a_step_that_was_played_again_counts_once():
    again = record(2, flight={1: 4}, queue={0: 4}, oldest=1.0)
    (histogram, _, _), (ages, _, _), _ = figures_of([*LATE, again])
    assert histogram.bars == {"in flight": {0: 4, 1: 4}, "in the queue": {0: 8}}
    assert curves(ages)["oldest token"] == ((1, 0.0), (2, 1.0))


def test_a_run_of_an_older_version_has_no_histogram_but_the_rest():
    records = [{name: value for name, value in row.items() if "/groups_" not in name} for row in LATE]
    assert [figure.title for figure, _, _ in figures_of(records)] == ["Staleness of tokens", "At work"]


def test_the_report_of_a_synchronous_run_has_no_such_section():
    synchronous = [{"step": 1, "time_s": 1.0, "perf/wait_time_ratio": 0.5, "perf/overlap_time_ratio": 0.0}]
    assert HEADING not in render_report(report(records=[*RECORDS, *synchronous]))
    html = render_report(report(records=[*RECORDS, *LATE]))
    assert HEADING in html
    page = Page(html)
    figures = [i for i, tag in enumerate(page.tags) if tag == "figure"]
    titles = [page.texts[i].split("\n")[1].strip() for i in figures]
    assert [title for title in titles if title.startswith(("Staleness", "At work"))] == [
        *("Staleness of groups groups", "Staleness of tokens versions"),
        "At work share of the iteration",
    ]


@pytest.mark.full
def test_bars_stand_side_by_side_in_a_real_browser(page, tmp_path):
    page.goto(write_report(report(records=[*RECORDS, *LATE]), tmp_path / "report.html").as_uri())
    figure = page.locator("figure", has_text="Staleness of groups")
    boxes = figure.locator("svg:not(.key) rect").evaluate_all(
        "nodes => nodes.map(node => node.getBoundingClientRect()).map(b => [b.left, b.right, b.height])"
    )
    assert len(boxes) == 4
    assert all(right > left and height > 0 for left, right, height in boxes)
    ordered = sorted(boxes)
    assert all(first[1] <= second[0] + 0.5 for first, second in pairwise(ordered))
