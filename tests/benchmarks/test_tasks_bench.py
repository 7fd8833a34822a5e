"""The benchmark of starts: each kind of tasks starts, and its figures are those of its starts."""

from __future__ import annotations

from benchmarks.tasks import bench_tasks


def test_every_kind_of_tasks_starts_and_is_timed():
    result = bench_tasks(starts=3)
    rows = result["rows"]
    assert len(rows) == len(result["summary"]) == 4
    for row in rows:
        assert 0 < row["least_ms"] <= row["median_ms"] <= row["most_ms"]
        assert row["first_ms"] > 0
