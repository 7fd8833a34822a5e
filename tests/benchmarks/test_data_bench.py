"""The benchmark of data on small files."""

from __future__ import annotations

import json

import pytest

from benchmarks.data import GROUPS, LINES, Settings, bench_data
from benchmarks.data_reader import FULL_READ, OURS, measure
from tests.data.files import ROWS, write_parquet

SMALL = Settings(rows=3000, drawn=50, anywhere=3)


@pytest.mark.full
def test_every_file_is_read_by_both_sides(tmp_path):
    events = []
    result = bench_data(SMALL, repeats=2, on_event=events.append)
    assert json.loads(json.dumps(result)) == result
    assert [row["name"] for row in result["rows"]] == [*GROUPS, LINES] == [*result["summary"]]
    for row in result["rows"]:
        sides = [OURS] if row["name"] == LINES else [OURS, FULL_READ]
        assert [side for side in (OURS, FULL_READ) if side in row] == sides
        for side in sides:
            assert len(row[side]["first_batch_s"]["runs"]) == 2
            assert row[side]["first_batch_s"]["median"] >= row[side]["open_s"]["median"] > 0
            assert row[side]["memory_mb"]["median"] >= row[side]["memory_at_first_batch_mb"]["median"] >= 0
    assert result["settings"]["rows"] == 3000
    assert len(events) == 1 + 2 * 4


def test_both_sides_draw_every_row(tmp_path):
    path = str(write_parquet(tmp_path / "a.parquet", ROWS))
    for side in (OURS, FULL_READ):
        assert measure(side, path, 100, 5, seed=1)["prompts_per_s"] > 0
