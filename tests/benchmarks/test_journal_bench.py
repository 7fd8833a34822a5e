"""The journal benchmark with few entries: both sides write equal entries, and figures match the rows."""

from __future__ import annotations

import json

from benchmarks.journal import BASELINE, JOURNAL, JournalLoad, bench_journal, writes_are_equal

SMALL = JournalLoad(episodes=12, tokens=400, repeats=2)


def test_both_sides_write_the_same_entries(tmp_path):
    assert writes_are_equal(SMALL, tmp_path)


def test_the_summary_is_computed_from_the_rows():
    result = bench_journal(SMALL)
    assert json.loads(json.dumps(result)) == result
    assert {side: len(rows) for side, rows in result["rows"].items()} == {JOURNAL: 2, BASELINE: 2}
    assert result["summary"]["longest_stall_ms"] == max(row["stall_ms"] for row in result["rows"][JOURNAL])
    assert 0.1 < result["summary"]["compressed_to"] < 0.8
    assert result["settings"]["baseline"] == BASELINE
