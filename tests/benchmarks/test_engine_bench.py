"""The comparison counts only requested tokens, and restores torch's number of threads."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
import torch

from benchmarks.engine import (
    CONCURRENT,
    TINY_WORKLOADS,
    GenerationWorkload,
    ModelUnderTest,
    bench_engine,
    tiny_model,
)

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
    assert result["settings"]["baseline"]["version"] == version("transformers")
    (row,) = result["rows"]
    for side in ("embedded", "transformers"):
        assert len(row["sides"][side]["tokens_per_s"]) == 2
    medians = [row["sides"][side]["median"] for side in ("embedded", "transformers")]
    assert row["ratio"] == pytest.approx(medians[0] / medians[1])
    assert list(result["summary"]) == [f"tiny float32, {workload.name}"]


def test_the_targets_are_every_concurrency_up_to_the_quickstarts() -> None:
    sampled = [workload for workload in CONCURRENT if workload.temperature == 1]
    assert [workload.concurrency for workload in sampled] == [32, 128, 256, 512]
    assert {(workload.prompt, workload.new, workload.is_target) for workload in sampled} == {
        ((24, 24), (64, 64), True)
    }
    assert set(CONCURRENT) <= set(TINY_WORKLOADS)
