"""The benchmark of the journal, small: both sides write the same, and the figures are those of the rows."""

from __future__ import annotations

import json

from benchmarks.journal import BASELINE, JOURNAL, Step, bench_journal, written_alike

SMALL = Step(episodes=12, tokens=400, repeats=2)


def test_both_sides_write_the_same_entries(tmp_path):
    assert written_alike(SMALL, tmp_path)


def test_the_summary_is_made_of_the_rows():
    result = bench_journal(SMALL)
    assert json.loads(json.dumps(result)) == result
    assert {side: len(rows) for side, rows in result["rows"].items()} == {JOURNAL: 2, BASELINE: 2}
    assert result["summary"]["longest_stall_ms"] == max(row["stall_ms"] for row in result["rows"][JOURNAL])
    assert 0.1 < result["summary"]["compressed_to"] < 0.8
    assert result["settings"]["baseline"] == BASELINE
