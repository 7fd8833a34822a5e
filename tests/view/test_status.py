"""The status of a run as text."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from agentrl.errors import ConfigError
from agentrl.records.status import (
    STATUS,
    GroupStaleness,
    InProgress,
    Oldest,
    PlacesTaken,
    ProcessStatus,
    RunStatus,
    Utilisation,
    read_status,
)
from agentrl.view.status import blame_text, figures_of, stage_text, status_lines

NOW = datetime(2030, 1, 2, 14, 8, 31).astimezone()


def since(seconds: float, name: str, what: str = "") -> InProgress:
    return InProgress(name=name, what=what, since=NOW - timedelta(seconds=seconds))


OLDEST = Oldest(group=since(320, "g12"), episode=since(318, "g12-3"), stage=since(310, "tool", "search"))
BUSY = RunStatus(
    time=NOW,
    pid=1,
    step=3,
    steps=40,
    served=3,
    training=4,
    places=PlacesTaken(capacity=16, in_flight=5, waiting=3, in_training=8, blocked_by="capacity"),
    staleness=GroupStaleness(flight={0: 6, 1: 2}, queue={1: 8}),
    utilisation=Utilisation(seconds=60.0, engine=0.92, trainer=0.4, both=0.38),
    requests=7,
    working=(since(330, "RL"), since(12, "train")),
    episodes={"tool": 4, "act": 7},
    oldest=OLDEST,
    waits={"new groups": "a place"},
    processes={
        "player 0": ProcessStatus(where="process 9", groups=2, episodes={"act": 3, "tool": 1}),
        "player 1": ProcessStatus(where="process 10", waits_for="a group", waits_since=NOW),
        "rank 0": ProcessStatus(where="process 12 on 10.0.0.2", doing=since(12, "update")),
        "server-0": ProcessStatus(where="http://127.0.0.1:30000", doing=since(320, "in service"), version=3),
        "server-1": ProcessStatus(
            where="http://127.0.0.1:30001", doing=since(5, "out of service", "it ended")
        ),
    },
    idle_s=0.4,
)
LINES = """\
state            running, as of 2 s ago
step             3 of 40
in               RL since 14:03:01 (5 min 30 s)
in               train since 14:08:19 (12 s)
versions         3 served, 4 in training
utilisation      engine 92% (7 requests now), trainer 40%, both 38%, of the last 1 min 00 s
places           16 of 16 taken: 5 in flight, 3 waiting, 8 in training
staleness        in flight 0: 6, 1: 2 (versions: groups of the last batch)
staleness        in queue  1: 8 (versions: groups of the last batch)
episodes         4 in the tool
episodes         7 waiting for the engine
oldest           the oldest group is g12, since 14:03:11 (5 min 20 s); its episode g12-3 is \
in the tool search since 14:03:21 (5 min 10 s)
waits            new groups for a place
player 0         process 9                          2 groups: 3 waiting for the engine, 1 in the tool
player 1         process 10                         waits for a group since 14:08:31 (0 s)
rank 0           process 12 on 10.0.0.2             update since 14:08:19 (12 s)
server-0         http://127.0.0.1:30000  version 3  in service since 14:03:11 (5 min 20 s)
server-1         http://127.0.0.1:30001             out of service (it ended) since 14:08:26 (5 s)
last progress    0 s before
"""


def test_the_lines_of_a_status():
    lines = list(status_lines(BUSY, "running", NOW + timedelta(seconds=2)))
    assert lines == LINES.splitlines()


def test_a_hang_is_one_sentence():
    hung = BUSY.model_copy(update={"idle_s": 310.0, "event_loop": "maze.py, line 12"})
    assert blame_text(hung) == (
        "no progress for 5 min 10 s; the event loop is held at maze.py, line 12, by code that is called in "
        "it and does not return; in RL since 14:03:01 (5 min 30 s); in train since 14:08:19 (12 s); the "
        "trainer waits for rank 0 (process 12 on 10.0.0.2); the oldest group is g12, since 14:03:11 (5 min "
        "20 s); its episode g12-3 is in the tool search since 14:03:21 (5 min 10 s); new groups wait for a "
        "place."
    )


def test_of_many_ranks_that_are_waited_for_the_first_are_named():
    doing = InProgress(name="update", since=BUSY.time)
    processes = {
        f"rank {number}": ProcessStatus(where=f"process {number} on m", doing=doing) for number in range(6)
    }
    processes["rank 6"] = ProcessStatus(
        where="process 6 on m", waits_for="the other ranks", waits_since=BUSY.time
    )
    waiting = BUSY.model_copy(update={"processes": processes})
    assert "waits for rank 0 (process 0 on m), rank 1 (process 1 on m), rank 2" in blame_text(waiting)
    assert "rank 3 (process 3 on m) and 2 more; the oldest" in blame_text(waiting)
    assert "rank" not in blame_text(waiting.model_copy(update={"working": ()}))


def test_the_rewards_of_a_group_and_the_episodes_of_an_evaluation_are_named():
    of_group = Oldest(group=since(9, "g1"), episode=None, stage=since(8, "reward", "best"))
    of_evaluation = Oldest(group=None, episode=since(9, "e1"), stage=since(8, "wait", "python"))
    assert blame_text(BUSY.model_copy(update={"oldest": of_group})).endswith(
        "it is in the reward best since 14:08:23 (8 s); new groups wait for a place."
    )
    assert "episode e1 of an evaluation is waiting for a slot of python since 14:08:23 (8 s)" in blame_text(
        BUSY.model_copy(update={"oldest": of_evaluation})
    )
    assert stage_text(since(0, "own")) == "in own"


def test_a_progress_bar_shows_it_in_short():
    assert figures_of(BUSY) == {"engine": "92% busy", "trainer": "40% busy"}


def test_a_status_is_read_as_it_was_written_and_a_missing_or_damaged_one_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="has no status"):
        read_status(tmp_path)
    BUSY.write(tmp_path)
    assert read_status(tmp_path) == BUSY
    (tmp_path / STATUS).write_text("{")
    with pytest.raises(ConfigError, match="remove that file"):
        read_status(tmp_path)


def test_a_start_says_what_it_waits_for_and_how_long_each_part_took():
    starting = BUSY.model_copy(
        update={
            "start": {"reading the checkpoint": 72.0, "starting the engine": 5.25},
            "working": (since(9, "loading the checkpoint"),),
            "processes": {"player 0": ProcessStatus(where="process 7", doing=since(65, "starting"))},
        }
    )
    shown = list(status_lines(starting, "running", NOW))
    assert "start            so far reading the checkpoint 1 min 12 s, starting the engine 5 s" in shown
    assert "in               loading the checkpoint since 14:08:22 (9 s)" in shown
    assert "player 0         process 7  starting since 14:07:26 (1 min 05 s)" in shown
