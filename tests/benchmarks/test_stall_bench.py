"""The stall of the event loop during an update, measured small."""

from __future__ import annotations

import json

import pytest

from benchmarks.stall import INLINE, RANK, Stall, bench_stall

SMALL = Stall(layers=2, width=64, vocab=256, samples=64, tokens=64, repeats=2)


@pytest.mark.full
def test_an_inline_step_stalls_the_loop_for_its_whole_duration():
    result = bench_stall(SMALL)
    assert json.loads(json.dumps(result)) == result
    assert {side: len(rows) for side, rows in result["rows"].items()} == {INLINE: 2, RANK: 2}
    for row in result["rows"][INLINE]:
        assert row["stall_ms"] >= 0.8 * 1000 * row["step_s"] - 20
    assert result["summary"]["longest_stall_ms"] == max(row["stall_ms"] for row in result["rows"][RANK])
    assert result["settings"]["baseline"] == INLINE
    assert result["settings"]["parameters"] > 50_000
