"""The benchmark of tools plays every side on both engines, and counts each call once."""

from __future__ import annotations

import json
import math

import pytest

from agentrl.types import ToolStats
from benchmarks.tools import HOSTED, INLINE, ON_LOOP, THREAD, ToolLoad, bench_tools, p95_ms


@pytest.mark.full
def test_both_tools_are_called_under_both_engines():
    load = ToolLoad(groups=2, siblings=2, slots=3, rows=20, repeats=2)
    result = bench_tools(load)
    assert json.loads(json.dumps(result)) == result
    assert set(result["summary"]) == {HOSTED, ON_LOOP}
    assert set(result["sections"]) == {
        f"{engine}, {kind}" for engine in (HOSTED, ON_LOOP) for kind in (THREAD, INLINE)
    }
    for figures in result["sections"].values():
        assert len(figures["call_ms"]["repeats"]) == load.repeats
        assert 0 < figures["call_ms"]["median"] < 1000 * figures["wall_s"]["median"]


def test_the_quantile_is_the_end_of_its_bin():
    assert p95_ms(ToolStats(calls=100, took={"1ms": 94, "30ms": 6})) == 30
    assert p95_ms(ToolStats(calls=100, took={"1ms": 95, "30ms": 5})) == 1
    assert p95_ms(ToolStats(calls=2, took={"1ms": 1, "more": 1})) == math.inf
