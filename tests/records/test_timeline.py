"""The timeline of a run: a bounded Chrome trace, and the shares that its pictures are drawn of."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import pytest

from agentrl.records.timeline import Timeline
from agentrl.runtime import activity
from agentrl.runtime.activity import (
    ENDED,
    EPISODES,
    EVALUATION,
    GROUPS,
    KINDS,
    MAX_BUCKETS,
    MAX_SPANS,
    OUT,
    RUN,
    SERVES,
    TRAIN,
    Activities,
    Span,
    group_in_play,
    in_play,
    working,
)
from agentrl.runtime.stage import stage


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    times = [100.0]
    monkeypatch.setattr(activity, "perf_counter", lambda: times[0])

    def set_to(time_s):
        times[0] = 100.0 + time_s

    return set_to


@pytest.fixture
async def timeline(clock):
    """One iteration of eight seconds, by hand.

    play   ==        from 0 to 2
    tool     =====   from 2 to 7
    train     ====   from 3 to 7
    """
    activities = Activities()
    with activities.observed(), working("RL"), group_in_play("g0"), in_play("g0-0"):
        async with stage("act", None):
            clock(2)
        async with stage("tool", None, "search"):
            clock(3)
            with working(TRAIN):
                clock(7)
        clock(8)
    return Timeline.of(activities)


def events_of(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_the_trace_has_each_stage_at_its_time_and_the_overlap_of_both_sides(timeline, tmp_path):
    path = tmp_path / "timeline" / "attempt_1.json.gz"
    timeline.write(path)
    events = events_of(path)
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = {
        (titles[e["pid"], e["tid"]], e["name"]): (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        for e in events
        if e["ph"] == "X"
    }
    assert spans == {
        ("iterations", "RL"): (0, 8),
        ("train", "train"): (3, 7),
        ("group", "group"): (0, 8),
        ("episode", "episode"): (0, 8),
        ("episode", "act"): (0, 2),
        ("episode", "tool search"): (2, 7),
    }
    shares = defaultdict(dict)
    for event in events:
        if event["ph"] == "C":
            shares[event["name"]][event["ts"] / 1e6] = event["args"]["share"]
    assert set(shares) == set(KINDS)
    # A counter holds its value until the next one.
    assert [at for at, share in shares["train"].items() if share == 1] == [pytest.approx(3, abs=0.1)]
    assert max(shares["train"]) == pytest.approx(7, abs=0.1)
    assert list(shares["reward"].values()) == [0]


def test_stages_of_one_row_of_the_trace_are_nested_and_never_cross(timeline, tmp_path):
    timeline.write(tmp_path / "t.json.gz")
    rows = defaultdict(list)
    for event in events_of(tmp_path / "t.json.gz"):
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        for start, end in spans:
            assert not any(start < other < end < after for other, after in spans)


@pytest.mark.parametrize("window", [None, (100.0, 108.0)])
def test_the_columns_of_a_picture_are_shares_of_their_time(timeline, window):
    assert timeline.columns("play", 8, window) == pytest.approx([1, 1, 0, 0, 0, 0, 0, 0], abs=0.02)
    assert timeline.columns("tool", 4, window) == pytest.approx([0, 1, 1, 0.5], abs=0.02)
    assert timeline.columns("train", 4, window) == pytest.approx([0, 0.5, 1, 0.5], abs=0.02)
    assert timeline.columns("eval", 4, window) == [0, 0, 0, 0]
    # Columns that are finer than spans and buckets.
    fine = timeline.columns("play", 1600, window)
    assert sum(fine) == pytest.approx(400, rel=0.01)
    assert max(fine) <= 1


def test_each_process_is_one_of_the_trace_with_its_machine_and_a_stage_in_progress_ends_now(clock):
    activities = Activities()
    activities.enter("server-0", SERVES, where="near:1")
    clock(2)
    activities.enter("server-0", OUT, "it ended")
    clock(3)
    activities.enter("server-0", SERVES, where="near:1", version=4)
    activities.enter("rank 10", "update")
    clock(5)
    activities.enter("rank 10", ENDED)
    activities.spans.append(Span("group", "", "g0", GROUPS, 1, 101, 104, "player 0"))
    clock(8)
    where = {"": "process 1", "rank 2": "process 2 on far", "rank 10": "process 3 on far"}
    timeline = Timeline.of(activities, where)
    events = list(timeline.events())
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(titles.values()) == [
        *("the run (process 1)", "player 0", "rank 2 (process 2 on far)", "rank 10 (process 3 on far)"),
        "server-0 (near:1)",
    ]
    spans = [(titles[e["pid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert sorted(spans) == [
        ("player 0", "group", 1, 3),
        ("rank 10 (process 3 on far)", "update", 3, 2),
        ("server-0 (near:1)", "in service", 0, 2),
        ("server-0 (near:1)", "in service", 3, 5),
        ("server-0 (near:1)", "out of service it ended", 2, 1),
    ]
    window = (100.0, 108.0)
    assert timeline.columns_of("server-0", 8, window) == [1, 1, 0, 1, 1, 1, 1, 1]
    assert timeline.columns_of("player 0", 4, window) == [0.5, 1, 0, 0]
    assert timeline.columns_of("rank 2", 2, window) == [0, 0]


def test_spans_at_the_same_time_count_once():
    spans = [Span("act", "", "e", EPISODES, lane, 0, 4) for lane in (1, 2)]
    spans += [Span("act", "", "e", EPISODES, 3, 2, 6)]
    timeline = Timeline(0, 8, {}, spans)
    assert timeline.columns("play", 4, (0, 8)) == [1, 1, 1, 0]
    # A window cuts what began before it.
    assert timeline.columns("play", 2, (5, 9)) == [0.5, 0]


def test_the_last_iterations_begin_where_the_spans_do():
    iterations = [Span("RL", "", "RL", RUN, 0, n, n + 1) for n in range(9)]
    assert Timeline(0, 9, {}, iterations).last(2) == (7, 9)
    late = [Span("act", "", "e", EPISODES, 1, 7.5, 7.75), iterations[-1]]
    assert Timeline(0, 9, {}, late).last(2) == (8, 9)
    assert Timeline(0, 9, {}, late[:1]).last(2) is None


def test_a_trace_of_any_run_is_bounded(tmp_path, clock):
    activities = Activities()
    places = (GROUPS, EPISODES, EVALUATION)
    for n in range(MAX_SPANS + 10):
        activities.spans.append(Span("x" * 10_000, "", "g", places[n % 3], 1, n, n + 1))
    for n in range(0, 40 * MAX_BUCKETS, 37):
        clock(n)
        activities.meters["play"].begin()
        clock(n + 13)
        activities.meters["play"].end()
    events = list(Timeline.of(activities).events())
    spans = [event for event in events if event["ph"] == "X"]
    shares = [event for event in events if event["ph"] == "C"]
    assert len(spans) == MAX_SPANS
    assert MAX_BUCKETS / 4 < len(shares) <= MAX_BUCKETS + 2 * len(KINDS)
    assert max(len(json.dumps(event)) for event in (*spans[-3:], *shares)) < 350


def test_a_disk_that_takes_no_trace_keeps_the_last_one(timeline, tmp_path, monkeypatch):
    path = tmp_path / "t.json.gz"
    timeline.write(path)
    before = path.read_bytes()

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentrl.records.timeline.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        timeline.write(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["t.json.gz"]
