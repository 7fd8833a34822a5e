from math import exp
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given

from agentrl.algorithms.off_policy import mismatch_metrics
from tests.algorithms.batches import Batch, EpisodeSpec, batch, batches, walk
from tests.algorithms.episodes import of_engine

NO_GAP = {
    "train_rollout_logprob_abs_diff": 0.0,
    "train_rollout_kl": 0.0,
    "train_rollout_kl_k3": 0.0,
    "train_rollout_ppl_ratio": 1.0,
    "train_rollout_ess": 1.0,
    "train_rollout_max_ratio": 1.0,
}


def naive_metrics(drawn: Batch):
    gaps = [
        [
            float(drawn.samples[k.sample].logprobs[k.position])
            - float(drawn.scores.old[k.sample][k.position])
            for k in tokens
        ]
        for tokens in walk(drawn.samples).values()
        if tokens
    ]
    all_gaps = [d for episode_gaps in gaps for d in episode_gaps]
    if not all_gaps:
        return NO_GAP
    ratios = [exp(-d) for d in all_gaps]
    return {
        "train_rollout_logprob_abs_diff": fmean(map(abs, all_gaps)),
        "train_rollout_kl": fmean(all_gaps),
        "train_rollout_kl_k3": fmean(exp(-d) - 1 + d for d in all_gaps),
        "train_rollout_ppl_ratio": fmean(exp(fmean(episode_gaps)) for episode_gaps in gaps),
        "train_rollout_ess": sum(ratios) ** 2 / len(ratios) / sum(r * r for r in ratios),
        "train_rollout_max_ratio": max(ratios),
    }


@given(batches())
def test_metrics_agree_with_pencil_and_paper(drawn):
    assert mismatch_metrics(drawn.tokens, drawn.token_scores) == pytest.approx(
        naive_metrics(drawn), rel=1e-6, abs=1e-9
    )


def test_without_a_gap_nothing_is_off():
    drawn = batch([EpisodeSpec([2, 1]), EpisodeSpec([0])])
    assert mismatch_metrics(drawn.tokens, drawn.tokens.scores(of_engine(drawn.samples))) == NO_GAP
    assert mismatch_metrics(batch().tokens, batch().token_scores) == NO_GAP


@given(batches(gap=1e4))
def test_huge_gaps_stay_finite(drawn):
    metrics = mismatch_metrics(drawn.tokens, drawn.token_scores)
    assert all(np.isfinite(list(metrics.values())))
    assert 0 < metrics["train_rollout_ess"] <= 1 + 1e-9
    assert metrics["train_rollout_kl_k3"] >= 0
