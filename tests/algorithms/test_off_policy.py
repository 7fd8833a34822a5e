from math import exp
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given

from agentrl.algorithms.off_policy import mismatch_metrics
from tests.algorithms.batches import Batch, Told, batch, batches, walk
from tests.algorithms.episodes import of_engine

NO_GAP = {
    "train_rollout_logprob_abs_diff": 0.0,
    "train_rollout_kl": 0.0,
    "train_rollout_kl_k3": 0.0,
    "train_rollout_ppl_ratio": 1.0,
    "train_rollout_ess": 1.0,
    "train_rollout_max_ratio": 1.0,
}


def by_hand(one: Batch):
    gaps = [
        [
            float(one.samples[k.sample].logprobs[k.position]) - float(one.scores.old[k.sample][k.position])
            for k in told
        ]
        for told in walk(one.samples).values()
        if told
    ]
    all_gaps = [d for told in gaps for d in told]
    if not all_gaps:
        return NO_GAP
    ratios = [exp(-d) for d in all_gaps]
    return {
        "train_rollout_logprob_abs_diff": fmean(map(abs, all_gaps)),
        "train_rollout_kl": fmean(all_gaps),
        "train_rollout_kl_k3": fmean(exp(-d) - 1 + d for d in all_gaps),
        "train_rollout_ppl_ratio": fmean(exp(fmean(told)) for told in gaps),
        "train_rollout_ess": sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios),
        "train_rollout_max_ratio": max(ratios),
    }


@given(batches())
def test_metrics_agree_with_pencil_and_paper(one):
    assert mismatch_metrics(one.tokens, one.known) == pytest.approx(by_hand(one), rel=1e-6, abs=1e-9)


def test_without_a_gap_nothing_is_off():
    one = batch([Told([2, 1]), Told([0])])
    assert mismatch_metrics(one.tokens, one.tokens.scores(of_engine(one.samples))) == NO_GAP
    assert mismatch_metrics(batch().tokens, batch().known) == NO_GAP


@given(batches(gap=1e4))
def test_huge_gaps_stay_finite(one):
    metrics = mismatch_metrics(one.tokens, one.known)
    assert all(np.isfinite(list(metrics.values())))
    assert 0 < metrics["train_rollout_ess"] <= 1 + 1e-9
    assert metrics["train_rollout_kl_k3"] >= 0
