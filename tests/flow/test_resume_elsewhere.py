"""A run resumes with other ranks, another layout or the other trainer: the same policy plays on."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

import agentrl
from agentrl.records import reconcile
from tests.flow.runs import journal_of, metrics_of, tokens_of, train
from tests.flow.test_resume import SMALL, accounted

pytestmark = pytest.mark.full

SETTINGS = {**SMALL, "num_query_groups": 2, "inline": False, "num_rollout": 4, "save_interval": 1}
TP2 = {"trainer": "megatron", "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2}
DP2 = {"trainer": "megatron", "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 1}
TORCH = {"trainer": "torch", "actor_num_gpus_per_node": 1}
ONE = {"trainer": "megatron", "actor_num_gpus_per_node": 1}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        pytest.param(TORCH, TP2, id="torch to two ranks of Megatron"),
        pytest.param(TP2, DP2, id="two halves to two replicas"),
        pytest.param(TP2, TORCH, id="Megatron to torch"),
        pytest.param(ONE, {**DP2, "use_distributed_optimizer": False}, id="one rank to two"),
    ],
)
def test_a_run_goes_on_elsewhere_as_it_would_have_here(tmp_path, first, then):
    whole = train("Talkative", tmp_path, "whole", **SETTINGS, **first).folder
    half = train("Talkative", tmp_path, "half", **{**SETTINGS, **first, "num_rollout": 2}).folder
    before = load_file(half / "checkpoint" / "model.safetensors")
    agentrl.train(half, resume=True, num_rollout=4, quiet=True, **then)
    assert accounted(half).problems == () == reconcile(half).problems
    # The third batch is played by the weights of the second step, to the bit; the fourth by nearly the same.
    for one, other in zip(journal_of(whole, "step_000003*"), journal_of(half, "step_000003*"), strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert one["verdicts"] == other["verdicts"]
    rows = [{row["step"]: row for row in metrics_of(folder) if "train/lr" in row} for folder in (whole, half)]
    assert rows[0].keys() == rows[1].keys() == {1, 2, 3, 4}
    for name in ("train/grad_norm", "train/lr", "train/pg_loss"):
        assert rows[1][3][name] == pytest.approx(rows[0][3][name], rel=1e-4, abs=1e-6)
    last = [load_file(folder / "checkpoint" / "model.safetensors") for folder in (whole, half)]
    moved = max(np.abs(last[0][name] - before[name]).max() for name in before)
    apart = max(np.abs(last[0][name] - last[1][name]).max() for name in before)
    assert apart < 0.05 * moved
