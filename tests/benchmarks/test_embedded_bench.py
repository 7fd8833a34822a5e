"""The benchmark of the embedded engine: equal requests on both sides, and correct counts."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.compare import Duration, rates_of
from benchmarks.embedded import (
    CONCURRENT,
    TINY_WORKLOADS,
    GenerationWorkload,
    ModelUnderTest,
    bench_embedded,
)
from benchmarks.models import save, seeded, tiny_model

EQUAL = {"concurrency": 3, "prompt": (4, 4), "new": (5, 5)}
WORKLOADS = (
    GenerationWorkload("equal", **EQUAL),
    GenerationWorkload("ragged", concurrency=3, prompt=(2, 6), new=(1, 9), is_target=True),
    GenerationWorkload("greedy", **EQUAL, temperature=0.0),
    GenerationWorkload("turns", **EQUAL, turns=2, world=3),
)


def test_rates_are_amounts_over_wall_time():
    result = rates_of({"a": [Duration(2.0, 9.0), Duration(1.0, 9.0), Duration(4.0, 9.0)]}, 8, "per_s")
    assert result.medians == {"a": 4.0}
    assert result.figures == {"a": {"per_s": [4.0, 8.0, 2.0], "median": 4.0, "spread": 1.5}}


def test_both_sides_are_timed():
    threads = torch.get_num_threads()
    result = bench_embedded((ModelUnderTest("tiny", "float32", WORKLOADS, 2.0),), repeats=2)
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(result)) == result
    assert list(result["summary"]) == [f"tiny float32, {workload.name}" for workload in WORKLOADS]
    assert [row["target"] for row in result["rows"]] == [None, 2.0, None, None]
    for row in result["rows"]:
        sides = row["sides"]
        assert {side: len(figures["tokens_per_s"]) for side, figures in sides.items()} == {
            "embedded": 2,
            "transformers": 2,
        }
        medians = [sides[side]["median"] for side in ("embedded", "transformers")]
        assert row["ratio"] == pytest.approx(medians[0] / medians[1])


def test_the_targets_are_every_concurrency_up_to_the_quickstarts():
    sampled = [workload for workload in CONCURRENT if workload.temperature == 1]
    assert [workload.concurrency for workload in sampled] == [32, 128, 256, 512]
    assert {(workload.prompt, workload.new, workload.is_target) for workload in sampled} == {
        ((24, 24), (64, 64), True)
    }
    assert set(CONCURRENT) <= set(TINY_WORKLOADS)


def test_models_are_reproducible(tmp_path):
    first, second = (save(seeded(tiny_model), tmp_path / name) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
