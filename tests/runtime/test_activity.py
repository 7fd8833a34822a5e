"""Activities of a run: the stages that they are in, the time of each side, meters of bounded length."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import StageError
from agentrl.runtime import activity
from agentrl.runtime.activity import (
    ENDED,
    EPISODES,
    FINEST_S,
    MAX_BUCKETS,
    MAX_SPANS,
    PUBLISH,
    SCORE,
    TRAIN,
    Activities,
    Busy,
    Meter,
    Span,
    group_in_play,
    in_play,
    requesting,
    working,
)
from agentrl.runtime.stage import stage


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    times = [0.0]
    monkeypatch.setattr(activity, "perf_counter", lambda: times[0])

    def set_to(time_s):
        times[0] = time_s

    return set_to


def stages_of(episode):
    return [(mark.name, mark.what) for mark in episode.marks]


async def test_stages_at_the_same_time_end_in_any_order_and_leave_no_trace():
    activities, entered, released = Activities(), asyncio.Event(), asyncio.Event()

    async def tool(name, until):
        async with stage("tool", None, name):
            entered.set()
            await until.wait()

    with activities.observed(), group_in_play("g0"), in_play("g0-0") as episode:
        async with stage("step", None):
            first = asyncio.create_task(tool("first", released))
            second = asyncio.create_task(tool("second", entered))
            await second
            # The second has ended inside of the first.
            assert stages_of(episode) == [("step", ""), ("tool", "first")]
            assert episode.innermost.what == "first"
            released.set()
            await first
        assert episode.innermost is None
        with pytest.raises(StageError):
            async with stage("step", 0.001):
                await asyncio.sleep(1)
        assert episode.innermost is None
    assert not activities.in_progress
    names = [(span.name, span.what) for span in activities.spans if span.name == "tool"]
    assert names == [("tool", "second"), ("tool", "first")]


async def test_an_episode_belongs_to_its_group_and_one_of_an_evaluation_to_none():
    activities = Activities()
    with activities.observed():
        with group_in_play("g1") as group, in_play("g1-0") as episode:
            assert list(activities.in_progress) == [group]
            assert list(group.parts) == [episode]
        with in_play("e0") as episode:
            assert list(activities.in_progress) == [episode]
        with working(TRAIN) as training:
            assert list(activities.in_progress) == [training]
            # A call of the trainer has no stages: they are of the group that is played meanwhile.
            assert activity.current_activity() is None


async def test_outside_of_a_run_nothing_is_recorded():
    with group_in_play("g1"), in_play("g1-0"), working(TRAIN), requesting():
        async with stage("step", None):
            assert activity.current_activity() is None


async def test_activities_at_the_same_time_are_in_lanes_of_their_own():
    activities, released = Activities(), asyncio.Event()

    async def episode(name):
        with in_play(name):
            await released.wait()

    with activities.observed():
        tasks = [asyncio.create_task(episode(f"e{n}")) for n in range(3)]
        await asyncio.sleep(0)
        released.set()
        await asyncio.gather(*tasks)
        await episode("e3")
    lanes = {span.owner: span.lane for span in activities.spans}
    assert lanes == {"e0": 1, "e1": 2, "e2": 3, "e3": 1}


def test_the_time_of_each_side_is_that_of_the_table(clock):
    activities = Activities()
    with activities.observed():
        # engine     ====  ==      from 0 to 4, with a second request from 1 to 2; from 6 to 8
        # trainer       ====       from 3 to 7
        first, second, third = requesting(), requesting(), requesting()
        first.__enter__()
        clock(1), second.__enter__()
        clock(2), second.__exit__(None, None, None)
        clock(3)
        training = working(SCORE)
        training.__enter__()
        clock(4), first.__exit__(None, None, None)
        clock(6), third.__enter__()
        assert activities.busy == (6, 4, 3, 1)
        clock(7), training.__exit__(None, None, None)
        clock(8), third.__exit__(None, None, None)
    clock(10)
    assert activities.busy == (10, 6, 4, 2)
    assert activities.busy.since(Busy(4, 4, 1, 1)) == (6, 2, 3, 1)
    assert (activities.meters[SCORE].busy_s, activities.meters[PUBLISH].busy_s) == (4, 0)


INTERVALS = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), max_size=30)


@settings(max_examples=40)
@given(INTERVALS, st.integers(0, 30))
def test_a_meters_course_is_the_union_of_its_spans_at_a_bounded_resolution(lengths, scale):
    """A brute force counts hundredths of seconds; 2^scale of them pass in each."""
    events = [(start, 1) for start, _ in lengths] + [(start + length, -1) for start, length in lengths]
    tick_s = FINEST_S * 2.0**scale
    times = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activity, "perf_counter", lambda: times[0])
        meter = Meter()
        for tick, change in sorted(events, key=lambda event: (event[0], -event[1])):
            times[0] = tick * tick_s
            meter.begin() if change > 0 else meter.end()
    busy = {tick for start, length in lengths for tick in range(start, start + length)}
    assert meter.busy_s == pytest.approx(len(busy) * tick_s)
    assert len(meter.course) <= MAX_BUCKETS
    if lengths:
        # At least half of the buckets that it may have are used by what has passed.
        assert meter.bucket_s == FINEST_S or max(busy) * tick_s >= MAX_BUCKETS * meter.bucket_s / 2 - tick_s
    # Busy time up to each tick, and between two ticks in proportion.
    up_to = tick_s * np.cumsum([0, *(tick in busy for tick in range(1200))])
    edges = np.arange(len(meter.course) + 1) * meter.bucket_s / tick_s
    expected = np.diff(np.interp(edges, np.arange(1201), up_to))
    np.testing.assert_allclose(meter.course, expected, rtol=1e-6, atol=1e-9 * tick_s)


def test_the_course_has_what_is_still_in_progress_and_counts_it_once(clock):
    meter = Meter(began_s=5.0)
    clock(5.0), meter.begin()
    clock(5.025)
    assert meter.course == pytest.approx([0.01, 0.01, 0.005])
    clock(5.03), meter.end()
    assert meter.course[:3] == pytest.approx([0.01, 0.01, 0.01])
    assert meter.busy_s == pytest.approx(0.03)


def test_a_stage_of_another_process_ends_where_the_next_begins_and_waiting_is_none(clock):
    activities = Activities()
    clock(1), activities.enter("server-0", "in service", where="near:1", version=2)
    clock(3), activities.enter("server-0", "", "a call")
    clock(4), activities.enter("server-0", "in service")
    clock(6), activities.enter("server-0", ENDED)
    clock(7), activities.enter("server-0", "in service")
    spans = [(span.name, span.process, span.start_s, span.end_s) for span in activities.spans]
    assert spans == [("in service", "server-0", 1, 3), ("in service", "server-0", 4, 6)]
    assert activities.processes["server-0"].since_s == 7


def test_the_newest_spans_are_kept():
    activities = Activities()
    for n in range(MAX_SPANS + 5):
        activities.end(Span("step", "", "g0-0", EPISODES, 1, n, n + 0.5))
    assert len(activities.spans) == MAX_SPANS
    assert activities.spans[0].start_s == 5
