import random
from math import exp, log
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.corrections import Tis
from agentrl.algorithms.off_policy import mismatch_by_depth, mismatch_by_staleness, mismatch_metrics
from agentrl.algorithms.tokens import Tokens
from agentrl.types import Scores
from tests.algorithms.batches import Batch, EpisodeSpec, aged, batch, batches, walk
from tests.algorithms.episodes import of_engine, sample

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
            - float(drawn.scores.proximal[k.sample][k.position])
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


def naive_bins(drawn: Batch, samples, *, version: int, last: int, bounds: tuple[float, float]):
    """By name of the bin: of each of its tokens the ratio of the trainer's probability and the engine's."""
    ratios: dict[str, list[float]] = {}
    for token in (token for tokens in walk(samples).values() for token in tokens):
        age = version - int(samples[token.sample].versions[token.position])
        gap = float(drawn.scores.proximal[token.sample][token.position]) - float(
            samples[token.sample].logprobs[token.position]
        )
        ratios.setdefault(f"{age}" if age <= last else f"{last + 1}+", []).append(exp(gap))
    total = sum(map(len, ratios.values()))
    metrics = {}
    for name, members in ratios.items():
        size = len(members)
        metrics |= {
            f"staleness_{name}/share": size / total,
            f"staleness_{name}/k3": fmean(r - 1 - log(r) for r in members),
            f"staleness_{name}/ess": sum(members) ** 2 / size / sum(r * r for r in members),
            f"staleness_{name}/clipfrac": fmean(not bounds[0] <= r <= bounds[1] for r in members),
        }
    return metrics


@given(batches(), st.integers(0, 99), st.integers(0, 5))
def test_gauges_by_staleness_agree_with_a_loop_over_tokens(drawn, seed, last):
    samples = aged(drawn.samples, seed)
    tokens = Tokens.of(samples, 8)
    scores = tokens.scores(drawn.scores)
    clipped_N = Tis(1.5, 0.7)(tokens, scores).clipped_N
    expected = naive_bins(drawn, samples, version=8, last=last, bounds=(0.7, 1.5))
    metrics = mismatch_by_staleness(tokens, scores, clipped_N, max_staleness=last)
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9)
    only_shares = {name: value for name, value in expected.items() if name.endswith("/share")}
    assert mismatch_by_staleness(tokens, None, max_staleness=last) == pytest.approx(only_shares)


def test_by_depth_each_token_is_with_those_of_like_many_before_it():
    drawn = batch([EpisodeSpec([3, 2]), EpisodeSpec([4])])
    assert mismatch_by_depth(drawn.tokens, drawn.token_scores) == {}
    rng = random.Random(7)
    # Depth 1,023 is the last of the first bin.
    lengths = (2000, 900, 5000)
    masks = [[0, *rng.choices((0, 1), k=length - 1)] for length in lengths]
    samples = [sample(f"e{number}", mask) for number, mask in enumerate(masks)]
    slopes = [rng.uniform(-1, 1) / 5000 for _ in samples]
    proximal = tuple(
        (s.logprobs + slope * np.arange(len(s))).astype(np.float32)
        for s, slope in zip(samples, slopes, strict=True)
    )
    tokens = Tokens.of(samples)
    gaps = {0: [], 1024: [], 4096: []}
    for one, own in zip(samples, proximal, strict=True):
        for place in np.flatnonzero(one.loss_mask).tolist():
            d = float(one.logprobs[place]) - float(own[place])
            gaps[max(depth for depth in gaps if depth <= place)].append(exp(-d) - 1 + d)
    expected = {f"depth_{depth}/k3": fmean(values) for depth, values in gaps.items()}
    found = mismatch_by_depth(tokens, tokens.scores(Scores(proximal)))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-9)
