"""What another process does, in the run that it belongs to, also where its clock is another one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from agentrl.records import clock
from agentrl.records.clock import Moment, PeerClock
from agentrl.records.mirror import ActivityReport, Mirror, MirroredPart, MirroredStage, Reporter
from agentrl.records.status import oldest_in, processes_in
from agentrl.records.timeline import Timeline
from agentrl.runtime import activity
from agentrl.runtime.activity import ENDED, EPISODES, GROUPS, Activities, Span

ELSEWHERE = "another machine"
AHEAD_S = 5000


def report_at(sent_s, groups=(), spans=()):
    return ActivityReport(groups, spans, 3, frozenset({"play"}), Moment(ELSEWHERE, sent_s))


def test_the_clock_of_another_machine_is_known_but_for_the_quickest_message(monkeypatch):
    here = [100.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: here[0])
    peer = PeerClock()
    # Its clock is 40 s behind; messages take 0.5, 0.125 and 2 s.
    for sent_s, arrived_s, expected in ((60, 100.5, 40.5), (61, 101.125, 40.125), (62, 104, 40.125)):
        here[0] = arrived_s
        assert peer.offset_s(Moment(ELSEWHERE, sent_s)) == expected
    # The clocks drift apart: what was measured long ago does not count.
    for number in range(clock._NEWEST):
        here[0] = 200 + number
        offset_s = peer.offset_s(Moment(ELSEWHERE, 100 + number))
    assert offset_s == 100
    assert peer.offset_s(clock.now()) == 0


def test_groups_and_spans_of_another_machine_have_times_of_this_one(monkeypatch):
    monkeypatch.setattr(clock, "perf_counter", lambda: 1000.0)
    activities = Activities()
    mirror = Mirror(activities, "player 1 (process 7 on far)", 1)
    stage = MirroredStage("tool", "search", 10.0)
    group = MirroredPart("g4", 8.0, (), (MirroredPart("g4-0", 9.0, (stage,)), MirroredPart("g4-1", 9.0, ())))
    mirror.show(report_at(20.0, (group,), (Span("act", "", "g4-0", EPISODES, 1, 6.0, 9.5),)))
    (shown,) = activities.in_progress
    assert (shown.id, shown.since_s, shown.process) == ("g4", 988.0, "player 1")
    assert [mark.since_s for part in shown.parts for mark in part.marks] == [990.0]
    assert oldest_in(activities).group.what == "player 1 (process 7 on far)"
    (span,) = activities.spans
    assert (span.start_s, span.end_s, span.process, span.lane) == (986.0, 989.5, "player 1", 1)
    where = {"player 1": "process 7 on far"}
    status = processes_in(activities, where)["player 1"]
    assert (status.where, status.groups) == ("process 7 on far", 1)
    assert status.episodes == {"tool": 1, "between two stages": 1}
    assert Timeline.of(activities, where).processes == ["player 1"]
    mirror.show(report_at(21.0))
    waiting = processes_in(activities, where)["player 1"]
    assert (waiting.waits_for, waiting.groups) == ("a group", 0)
    mirror.show(report_at(22.0))
    assert processes_in(activities, where)["player 1"].waits_since == pytest.approx(
        waiting.waits_since, abs=timedelta(seconds=0.1)
    )
    mirror.clear()
    assert activities.processes["player 1"].name == ENDED
    assert not activities.in_progress


REPORTS = """
import json, time
from agentrl.runtime.activity import Activities, GROUPS, Span
from agentrl.records.mirror import Reporter
activities = Activities()
begun = time.perf_counter()
time.sleep(0.1)
activities.spans.append(Span("group", "", "g0", GROUPS, 1, begun, time.perf_counter()))
print(json.dumps(Reporter(activities).report()._asdict(), default=list), flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("ahead_s", [0, AHEAD_S])
def test_a_process_of_a_real_machine_with_another_clock(ahead_s):
    """A time namespace is a machine with a clock of its own."""
    command = ["unshare", "-UrT", "--monotonic", str(ahead_s), "--fork", sys.executable, "-c", REPORTS]
    assert shutil.which("unshare")
    began_s = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    sent = json.loads(process.stdout.readline())
    spans = tuple(Span(*span) for span in sent["spans"])
    report = ActivityReport((), spans, 1, frozenset(), Moment(*sent["sent"]))
    activities = Activities()
    Mirror(activities, "player 0 (process 1)", 0).show(report)
    shown_s = time.perf_counter()
    assert process.wait() == 0
    assert report.sent.clock != clock.now().clock
    assert spans[0].end_s > began_s + ahead_s
    (span,) = activities.spans
    assert span.place == GROUPS
    assert began_s < span.start_s < span.end_s < shown_s
    assert span.end_s - span.start_s == pytest.approx(spans[0].end_s - spans[0].start_s, abs=1e-6)
    assert span.end_s == pytest.approx(shown_s, abs=0.3)


def test_a_report_of_this_machine_needs_no_clock():
    player = Activities()
    with player.observed(), activity.group_in_play("g0"), activity.in_play("g0-0"):
        report = Reporter(player).report()
        (group,) = player.in_progress
    activities = Activities()
    Mirror(activities, "player 0 (process 1)", 0).show(report)
    (shown,) = activities.in_progress
    assert shown.since_s == group.since_s
