"""The cost of deterministic inference, measured small."""

from __future__ import annotations

import json

from benchmarks.deterministic import WITH, WITHOUT, EngineLoad, bench_deterministic
from benchmarks.engine import GenerationWorkload

SMALL = EngineLoad(GenerationWorkload("small", concurrency=3, prompt=(4, 9), new=(5, 9), turns=2), 2, 64)


def test_both_engines_are_timed_on_the_same_requests():
    result = bench_deterministic(loads=(SMALL,), repeats=2)
    assert json.loads(json.dumps(result)) == result
    row = result["rows"]["small"]
    assert {side: len(figures["tokens_per_s"]) for side, figures in row["sides"].items()} == {
        WITH: 2,
        WITHOUT: 2,
    }
    assert row["ratio"] == row["sides"][WITH]["median"] / row["sides"][WITHOUT]["median"]
    assert result["settings"]["loads"] == [{"slots": 2, "context_len": 64}]
