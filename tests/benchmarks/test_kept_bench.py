"""The benchmark of what is kept with few episodes: both sides play them, and figures match the rows."""

from __future__ import annotations

import json
import statistics

from benchmarks.kept import KeptLoad, bench_kept


def test_the_summary_is_computed_from_the_rows():
    result = bench_kept(KeptLoad(loads=((40, 16), (400, 8)), repeats=3))
    assert json.loads(json.dumps(result)) == result
    assert result["summary"].keys() == {"40", "400"}
    for load, figures in result["summary"].items():
        for side in ("without", "kept"):
            repeats = result["rows"][load][side]["repeats"]
            assert figures["us_per_turn"][side] == statistics.median(repeats)
        # The tokens of three turns, their texts and the state of a random generator.
        assert figures["bytes_per_turn"] > 1000
