"""The benchmark of the pages with few episodes: its journal is one, and its figures are there."""

from __future__ import annotations

import json

import pytest

from agentrl.records import read_journal
from benchmarks.browser import browsers
from benchmarks.view import ViewLoad, bench_view, write_journal


def test_the_journal_is_one_that_a_run_could_have_written(tmp_path):
    write_journal(tmp_path, ViewLoad(tokens=40), 1100)
    paths = sorted((tmp_path / "trajectories").iterdir())
    entries = [entry for path in paths for entry in read_journal(path)]
    assert [path.name for path in paths] == ["step_000001.jsonl.gz", "step_000002.jsonl.gz"]
    assert [entry.episode.id for entry in entries[:11]] == [*(f"g0-{n}" for n in range(10)), "g1-0"]
    assert len(entries) == 1100


@pytest.mark.full
@pytest.mark.parametrize("browser", browsers()[:1])
def test_every_wait_is_measured(browser):
    result = bench_view(ViewLoad(episodes=200, tokens=40, repeats=1))
    assert json.loads(json.dumps(result)) == result
    assert result["summary"]["write"]["episodes"] == 200
    assert all(wait >= 0 for wait in result["summary"]["waits_ms"].values())
    assert result["settings"]["browser"] == browser
