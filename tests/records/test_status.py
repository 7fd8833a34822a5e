"""The status of a run that has no event loop yet."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from agentrl.errors import ConfigError
from agentrl.records.status import announced, read_status


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_block_without_an_event_loop_says_what_it_does_and_since_when(tmp_path):
    def status():
        with suppress(ConfigError):
            return read_status(tmp_path)

    with announced(tmp_path, "reading the checkpoint", "and its checksums"):
        wait_for(status)
        first = status()
        wait_for(lambda: status().time > first.time)
        (work,) = status().working
    assert (work.name, work.what) == ("reading the checkpoint", "and its checksums")
    assert work.since <= first.time < status().time
    assert status().pid == os.getpid()
    last = status().time
    time.sleep(0.05)
    assert status().time == last


def test_a_disk_that_takes_no_status_stops_nothing(tmp_path):
    with announced(tmp_path / "missing", "reading the checkpoint"):
        pass
