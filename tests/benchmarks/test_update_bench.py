"""The standstill of an update, measured small on the embedded engine."""

from __future__ import annotations

import json

import pytest

from benchmarks.models import tiny_model
from benchmarks.update import EMBEDDED, INLINE, RequestLoad, UpdateBench, bench_update

SMALL = UpdateBench((RequestLoad("tiny", tiny_model, 2, prompt=5, new=40),), repeats=2)


@pytest.mark.full
def test_an_engine_stands_still_for_a_part_of_an_update():
    result = bench_update(None, bench=SMALL)
    assert json.loads(json.dumps(result)) == result
    assert set(result["rows"]) == {f"tiny: {side}" for side in (EMBEDDED, INLINE)}
    for rows in result["rows"].values():
        assert len(rows) == SMALL.repeats
        for row in rows:
            assert 0 < row["standstill_s"] < row["seconds"]
            assert row["share"] == row["standstill_s"] / row["seconds"]
    assert result["settings"]["parameters"]["tiny"] > 500_000
    assert "target 10%" in result["summary"][f"tiny: {EMBEDDED}"]
