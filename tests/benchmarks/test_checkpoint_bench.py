"""The benchmark of checkpoints with a tiny model: every figure of both sections."""

from __future__ import annotations

import json

import pytest

from benchmarks.checkpoint import COPY, INLINE, RANK, CheckpointLoad, bench_checkpoint
from benchmarks.stall import Stall

SMALL = CheckpointLoad(
    Stall(layers=1, width=64, vocab=256, samples=1, tokens=8), {"num-layers": 1, "hidden-size": 64}, repeats=1
)


@pytest.mark.full
def test_every_figure_is_measured():
    result = bench_checkpoint(SMALL)
    assert json.loads(json.dumps(result)) == result
    assert set(result["summary"]["wait_s"]) == {INLINE, RANK, COPY}
    for name in ("step_s", "step_during_the_write_s", "written_s", "resume_s"):
        assert set(result["sections"][name]) == {INLINE, RANK}
    for side in (INLINE, RANK):
        sections = result["sections"]
        assert sections["wait_s"][side]["median"] < sections["written_s"][side]["median"]
        assert 1 < sections["resume_s"][side]["median"] < 300
