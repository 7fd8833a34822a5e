from itertools import product
from math import exp, log, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.algorithms.corrections import CorrectionWatch, IcePop, Mis, Tis
from agentrl.types import Scores
from tests.algorithms.batches import Batch, EpisodeSpec, batch, batches, by_sample, close, walk

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "clip", "mask")
CORRECTIONS = {
    "tis": Tis(1.5),
    "tis from below": Tis(1.5, 0.7),
    "icepop": IcePop(0.6, 1.8),
    **{f"{level} {mode}": Mis(level, mode, 0.8, 1.25) for level, mode in product(LEVELS, MODES)},
    "veto": Mis("token", "truncate", 0.8, 1.25, veto=0.5),
}


def with_gaps(*gaps, specs=None) -> Batch:
    """A batch whose tokens have these log-ratios, one list for each episode."""
    drawn = batch(specs or [EpisodeSpec([len(gap)]) for gap in gaps])
    old = [s.logprobs.copy() for s in drawn.samples]
    for tokens, gap in zip(walk(drawn.samples).values(), gaps, strict=True):
        for token, difference in zip(tokens, gap, strict=True):
            old[token.sample][token.position] += np.float32(difference)
    return drawn._replace(scores=Scores(tuple(old)))


def naive_factor(name, ratios, n):
    """The factor of token n of a sequence with these ratios."""
    if name == "tis":
        return min(ratios[n], 1.5)
    if name == "tis from below":
        return max(min(ratios[n], 1.5), 0.7)
    if name == "icepop":
        return ratios[n] if 0.6 <= ratios[n] <= 1.8 else 0.0
    if name == "veto":
        return 0.0 if min(ratios) < 0.5 else min(ratios[n], 1.25)
    level, mode = name.split()
    product = prod(ratios)
    ratio = {"token": ratios[n], "sequence": product, "geometric": product ** (1 / len(ratios))}[level]
    masked = ratio if 0.8 <= ratio <= 1.25 else 0.0
    return {"truncate": min(ratio, 1.25), "clip": max(min(ratio, 1.25), 0.8), "mask": masked}[mode]


def naive_factors(name, drawn: Batch):
    factors = {}
    for tokens in walk(drawn.samples).values():
        ratios = [
            exp(
                float(drawn.scores.proximal[token.sample][token.position])
                - float(drawn.samples[token.sample].logprobs[token.position])
            )
            for token in tokens
        ]
        for n, token in enumerate(tokens):
            factors[token.sample, token.position] = naive_factor(name, ratios, n)
    return by_sample(drawn.samples, factors)


def factors_of(correction, drawn: Batch):
    """One array for each sample."""
    return drawn.tokens.scatter(correction(drawn.tokens, drawn.token_scores).factors_N)


@given(drawn=batches())
def test_factors_agree_with_pencil_and_paper(drawn):
    for name, correction in CORRECTIONS.items():
        assert close(factors_of(correction, drawn), naive_factors(name, drawn)), name


def test_each_name_is_its_own_formula_and_no_other():
    gaps = [
        [0.3, -0.2, 0.65],
        [0.5, 0.55],
        [-0.9, 0.1],
        [-0.15, 0.05],
        [0.2, 0.2],
        [-0.1, -0.1],
        [0.55, -0.5],
    ]
    drawn = with_gaps(*gaps)
    same = {
        (name, other)
        for name, other in product(CORRECTIONS, CORRECTIONS)
        if close(factors_of(CORRECTIONS[name], drawn), naive_factors(other, drawn), 1e-4)
    }
    assert same == {(name, name) for name in CORRECTIONS}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_without_a_gap_every_factor_is_one(name):
    drawn = with_gaps([0.0, 0.0], [0.0])
    factors_N, metrics, _ = CORRECTIONS[name](drawn.tokens, drawn.token_scores)
    assert factors_N.tolist() == [1, 1, 1]
    kind = next(iter(metrics))
    assert {key: value for key, value in metrics.items() if value} == {kind: 1.0, f"{kind}_factor": 1.0}


@given(drawn=batches(gap=1e4))
def test_huge_gaps_stay_finite(drawn):
    for name, correction in CORRECTIONS.items():
        factors_N, metrics, _ = correction(drawn.tokens, drawn.token_scores)
        assert np.all(np.isfinite(factors_N)), name
        assert all(np.isfinite(list(metrics.values()))), name
        assert factors_N.max(initial=0.0) <= 1.8, name


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("specs", [[EpisodeSpec([0])], []])
def test_without_trainable_tokens_there_is_nothing_to_correct(name, specs):
    drawn = batch(specs)
    factors_N, metrics, _ = CORRECTIONS[name](drawn.tokens, drawn.token_scores)
    assert not len(factors_N)
    assert set(metrics.values()) == {0.0}


@given(st.sampled_from(LEVELS), st.sampled_from(MODES))
def test_a_sequence_is_an_episode_however_often_its_history_was_rewritten(level, mode):
    gaps = [0.1, 0.3, -0.1, 0.2]
    unsplit = with_gaps(gaps, specs=[EpisodeSpec([2, 2])])
    split = with_gaps(gaps, specs=[EpisodeSpec([2, 2], split=1)])
    per_token = [
        Mis(level, mode, veto=0.1)(b.tokens, b.token_scores).factors_N.tolist() for b in (unsplit, split)
    ]
    assert per_token[0] == per_token[1]


def test_metrics_count_tokens_and_dropped_sequences():
    drawn = with_gaps([log(4), 0.0], [log(0.25), 0.0])
    assert Tis(2.0)(drawn.tokens, drawn.token_scores).metrics == pytest.approx(
        {
            "tis": (4 + 1 + 0.25 + 1) / 4,
            "tis_abs": (3 + 0.75) / 4,
            "tis_clipfrac": 0.25,
            "tis_factor": (2 + 1 + 0.25 + 1) / 4,
        }
    )
    assert IcePop(0.5, 5.0)(drawn.tokens, drawn.token_scores).metrics == pytest.approx(
        {
            "icepop": (4 + 1 + 0.25 + 1) / 4,
            "icepop_abs": (3 + 0.75) / 4,
            "icepop_clipfrac": 0.25,
            "icepop_factor": (4 + 1 + 0 + 1) / 4,
        }
    )
    assert Mis("token", "truncate", 0.5, 2.0, veto=0.3)(
        drawn.tokens, drawn.token_scores
    ).metrics == pytest.approx(
        {
            "mis": (4 + 1 + 0.25 + 1) / 4,
            "mis_abs": (3 + 0.75) / 4,
            "mis_clipfrac": 0.25,
            "mis_factor": 0.75,
            "mis_masked": 0.5,
            "mis_veto": 0.5,
        }
    )


def test_bounds_are_inside():
    drawn = with_gaps([log(0.5), log(5.0)])
    drawn = drawn._replace(
        scores=Scores((np.array([0, *np.log([0.5, 5.0])], np.float32) + drawn.samples[0].logprobs,))
    )
    ratios = np.exp(drawn.scores.proximal[0].astype(np.float64) - drawn.samples[0].logprobs)[1:]
    factors_N = IcePop(float(ratios[0]), float(ratios[1]))(drawn.tokens, drawn.token_scores).factors_N
    assert factors_N.tolist() == pytest.approx([0.5, 5.0], rel=1e-5)


@pytest.mark.parametrize(
    "make", [Tis, lambda high, low: IcePop(low, high), lambda u, lo: Mis(lower=lo, upper=u)]
)
@pytest.mark.parametrize(("high", "low"), [(1.0, 1.0), (1.0, 2.0), (1.0, -0.1), (float("nan"), 0.0)])
def test_bounds_that_hold_nothing_are_refused(make, high, low):
    with pytest.raises(ValueError, match="0 <= low < high"):
        make(high, low)


@pytest.mark.parametrize("veto", [0.0, 1.0, -1.0])
def test_a_veto_that_is_no_ratio_is_refused(veto):
    with pytest.raises(ValueError, match="veto is a ratio"):
        Mis(veto=veto)


ACTS = {"tis": "tis_clipfrac", "mis": "mis_veto", "icepop": "icepop_clipfrac", "opsm": "opsm_masked"}


@pytest.mark.parametrize("name", ACTS)
def test_a_correction_that_never_acts_is_named_once(name):
    idle, acting = {f"train/{ACTS[name]}": 0.0}, {f"train/{ACTS[name]}": 1e-3}
    watch = CorrectionWatch(name, patience=4)
    assert watch.warnings(idle, num_steps=2) == ()
    assert watch.warnings(acting, num_steps=2) == ()
    assert watch.warnings(idle, num_steps=2) == ()
    assert watch.warnings({}, num_steps=0) == ()
    (sentence,) = watch.warnings(idle, num_steps=2)
    assert sentence.startswith(f"correction = {name} changed no token in 4 optimizer steps")
    assert watch.warnings(idle, num_steps=2) == ()


def test_without_a_correction_nothing_is_missed():
    assert CorrectionWatch(patience=1).warnings({}, num_steps=9) == ()


@pytest.mark.parametrize(("level", "acts"), [("geometric", True), ("token", False)])
def test_bounds_for_tokens_never_act_on_a_geometric_mean(level, acts):
    # As far apart as two precisions are: single tokens by a percent, their mean by a few thousandths.
    drawn = with_gaps([0.02, -0.01, 0.015], [0.001, -0.001, 0.0])
    bounds = AlgorithmConfig(correction="mis", mis_level=level).correction.bounds
    assert (Mis(level, "mask", *bounds)(drawn.tokens, drawn.token_scores).metrics["mis_masked"] > 0) == acts
    assert Mis(level, "mask", 0.5, 2.0)(drawn.tokens, drawn.token_scores).metrics["mis_masked"] == 0
