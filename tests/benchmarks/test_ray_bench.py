"""The cost of Ray, measured small."""

from __future__ import annotations

import json

import pytest

from agentrl.errors import UserError
from benchmarks.cluster.calls import LOCAL, RAY
from benchmarks.cluster.context import RayBench
from benchmarks.cluster.everything import SECTIONS, bench_ray
from benchmarks.cluster.lost_machine import PARTS
from benchmarks.cluster.publish import WAYS
from tests.engine.subjects import tiny as subject


def tiny():
    return subject("qwen3")


def test_an_unknown_section_is_refused():
    with pytest.raises(UserError, match="no section `publsh`; there are node, step_overhead, hand_off"):
        bench_ray(only=["publsh"])


@pytest.mark.full
def test_the_figures_of_both_sides_are_those_of_their_repeats():
    only = [name for name in SECTIONS if name != "node"]
    result = bench_ray(RayBench(episodes=8, tokens=64, long_tokens=4096, model=tiny, repeats=2), only=only)
    assert json.loads(json.dumps(result)) == result
    assert set(only) < set(result)
    for section, unit in (("step_overhead", "ms"), ("hand_off", "gb_per_s")):
        figures = result[section][unit]
        assert {side: len(figures[side]["repeats"]) for side in figures} == {LOCAL: 2, RAY: 2}
        assert all(value > 0 for side in figures.values() for value in side["repeats"])
    seconds = result["publish"]["seconds"]
    assert {name: len(side["repeats"]) for name, side in seconds.items()} == dict.fromkeys(
        ("copy", *(way.name for way in WAYS)), 2
    )
    assert all(value > 0 for side in seconds.values() for value in side["repeats"])
    # Whatever is large enough is read where the driver has put it.
    assert result["summary"]["share_of_arrays_without_a_copy_in_the_rank"] > 0.9


@pytest.mark.faults
def test_the_parts_from_a_kill_to_the_next_step_are_all_of_that_time():
    result = bench_ray(RayBench(node_steps=3, node_repeats=1), only=["node"])
    assert json.loads(json.dumps(result)) == result
    summary = result["summary"]
    assert sum(summary[f"kill_{part}_s"] for part in PARTS) == pytest.approx(summary["kill_to_next_step_s"])
    assert result["node"]["parts"].keys() == set(PARTS)
    assert all(len(part["repeats"]) == 1 for part in result["node"]["parts"].values())
    whole = summary["plain_resume_to_next_step_s"] + summary["step_s"]
    assert summary["kill_over_plain_resume_and_a_step"] * whole == pytest.approx(
        summary["kill_to_next_step_s"]
    )
