"""The comparison counts only requested tokens, and restores torch's number of threads."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.engine import GenerationWorkload, ModelUnderTest, bench_engine, tiny_model

SMALL = {"concurrency": 3, "prompt": (4, 4), "new": (5, 5)}


@pytest.mark.parametrize(
    "workload",
    [
        GenerationWorkload("equal", **SMALL),
        GenerationWorkload("ragged", concurrency=3, prompt=(2, 6), new=(1, 9)),
        GenerationWorkload("greedy", **SMALL, temperature=0.0),
        GenerationWorkload("turns", **SMALL, turns=2, world=3),
    ],
    ids=lambda workload: workload.name,
)
def test_both_sides_are_timed_on_the_same_requests(workload: GenerationWorkload) -> None:
    threads = torch.get_num_threads()
    under_test = ModelUnderTest("tiny", torch.float32, tiny_model, (workload,), 2.0)
    result = bench_engine(models=[under_test], repeats=2)
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(result)) == result
    (row,) = result["rows"]
    for side in ("embedded", "transformers"):
        assert len(row["sides"][side]["tokens_per_s"]) == 2
    medians = [row["sides"][side]["median"] for side in ("embedded", "transformers")]
    assert row["ratio"] == pytest.approx(medians[0] / medians[1])
    assert list(result["summary"]) == [f"tiny float32, {workload.name}"]
