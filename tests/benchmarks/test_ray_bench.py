"""The cost of Ray, measured small."""

from __future__ import annotations

import json

import pytest

from benchmarks.ray import LOCAL, RAY, SECTIONS, RayBench, bench_ray


@pytest.mark.full
def test_the_figures_of_both_sides_are_those_of_their_repeats():
    result = bench_ray(RayBench(episodes=8, tokens=64, long_tokens=4096, repeats=2))
    assert json.loads(json.dumps(result)) == result
    assert set(SECTIONS) < set(result)
    for section, unit in (("step_overhead", "ms"), ("hand_off", "gb_per_s")):
        figures = result[section][unit]
        assert {side: len(figures[side]["repeats"]) for side in figures} == {LOCAL: 2, RAY: 2}
        assert all(value > 0 for side in figures.values() for value in side["repeats"])
    # Whatever is large enough is read where the driver has put it.
    assert result["summary"]["share_of_arrays_without_a_copy_in_the_rank"] > 0.9
