"""The pictures of a timeline: which row, where, how dark."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from agentrl.records.timeline import Course, Timeline
from agentrl.runtime.activity import KINDS, MAX_BUCKETS, PROCESS, RUN, Span
from agentrl.view.report import COLUMNS, pictures

SVG = re.compile(
    r'<rect class="strip s(\d)" x="(\d+)" y="(\d+)" width="(\d+)" height="14" opacity="([\d.]+)"/>'
)


def timeline(**shares):
    """Ten seconds in ten buckets; of each kind the share of each."""
    courses = {kind: Course(1.0, shares.get(kind, [0.0] * 10)) for kind in KINDS}
    return Timeline(50.0, 60.0, courses, [])


def strips(picture):
    """The parts of each row: begin and end (seconds), darkness."""
    rows = {}
    for number, x, _, width, opacity in SVG.findall(str(picture)):
        begin = (int(x) - 80) / (2 * COLUMNS) * 10
        rows.setdefault(KINDS[int(number)], []).append(
            (begin, begin + int(width) / (2 * COLUMNS) * 10, float(opacity))
        )
    return rows


def test_rows_show_when_each_side_worked_and_how_much():
    ((title, picture),) = pictures(
        timeline(play=[1.0] * 4 + [0.0] * 6, train=[0.0] * 3 + [0.5] * 5 + [0.0] * 2)
    )
    assert title == "All of the run"
    assert strips(picture) == {"play": [(0.0, 4.0, 1.0)], "train": [(3.0, 8.0, 0.5)]}
    svg = ET.fromstring(str(picture))
    assert svg.get("aria-label") == "Share of 10 s at work: play 40%, train 25%."


def test_the_last_iterations_have_a_picture_of_their_own():
    spans = [Span("RL", "", "RL", RUN, 0, 50.0, 60.0), Span("train", "", "train", RUN, 0, 55.0, 57.5)]
    (_, (title, picture)) = pictures(
        Timeline(50.0, 90.0, timeline().courses, sorted(spans, key=lambda s: s.end_s))
    )
    assert title == "The last iterations"
    assert strips(picture) == {"train": [(0.0, 5.0, 1.0)]}


def test_the_last_iterations_have_a_row_for_each_process():
    spans = [Span("RL", "", "RL", RUN, 0, 50.0, 60.0)]
    spans += [Span("update", "", f"rank {n}", PROCESS, 1, 55.0, 57.5, f"rank {n}") for n in range(50)]
    whole, (_, picture) = pictures(Timeline(50.0, 60.0, timeline(play=[1.0] * 10).courses, spans))
    label = ET.fromstring(str(picture)).get("aria-label")
    assert label.startswith("Share of 10 s at work: rank 0 25%, rank 1 25%, rank 2 25%")
    assert label.endswith("rank 31 25%.")
    assert "rank" not in str(whole)


def test_a_picture_of_the_longest_run_is_small():
    noisy = {kind: Course(1.0, [(n % 9) / 9 for n in range(MAX_BUCKETS)]) for kind in KINDS}
    ((_, picture),) = pictures(Timeline(0.0, float(MAX_BUCKETS), noisy, []))
    assert len(str(picture)) < 120 * COLUMNS * len(KINDS)
