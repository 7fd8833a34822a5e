"""Gates and corrections in stages, against loops over tokens."""

from itertools import product
from math import exp, inf, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.contract import check_estimator
from agentrl.algorithms.corrections import Mis, Tis
from agentrl.algorithms.estimators import Adjusted
from agentrl.algorithms.gates import InStages, TokenGate
from agentrl.algorithms.group_relative import GroupRelative
from tests.algorithms.batches import Batch, EpisodeSpec, batch, batches, walk
from tests.algorithms.test_corrections import with_gaps

UPPER = {"token": 0.1, "mean": 0.06, "sum": 0.2, "max": 0.15}
GATES = {
    (statistic, over): TokenGate(
        statistic, over, UPPER[over], -0.5 * UPPER[over] if statistic == "k1" else -inf
    )
    for statistic, over in product(("k1", "k2", "k3"), ("token", "mean", "sum", "max"))
}


def gaps_of(drawn: Batch) -> list[list[float]]:
    """The log-ratios of each episode's tokens."""
    return [
        [
            float(drawn.scores.proximal[t.sample][t.position])
            - float(drawn.samples[t.sample].logprobs[t.position])
            for t in tokens
        ]
        for tokens in walk(drawn.samples).values()
    ]


def naive_is_open(name, drawn: Batch) -> list[bool]:
    statistic, over = name
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: exp(d) - 1 - d}[statistic]
    lower = -0.5 * UPPER[over] if statistic == "k1" else -inf
    is_open = []
    for gaps in gaps_of(drawn):
        values = [formula(max(-20.0, min(20.0, gap))) for gap in gaps]
        together = {"mean": lambda v: sum(v) / len(v), "sum": sum, "max": max}
        for value in values:
            compared = value if over == "token" else together[over](values)
            is_open.append(lower <= compared <= UPPER[over])
    return is_open


@given(drawn=batches())
def test_a_gate_is_open_where_a_loop_over_tokens_finds_it_open(drawn):
    for name, gate in GATES.items():
        assert gate(drawn.tokens, drawn.token_scores).is_open_N.tolist() == naive_is_open(name, drawn), name


def test_each_gate_is_its_own_formula_and_no_other():
    rng = np.random.default_rng(1)
    drawn = with_gaps(*(rng.normal(0, 0.35, rng.integers(1, 5)).tolist() for _ in range(400)))
    same = {
        (name, other)
        for name, other in product(GATES, GATES)
        if GATES[name](drawn.tokens, drawn.token_scores).is_open_N.tolist() == naive_is_open(other, drawn)
    }
    assert same == {(name, name) for name in GATES}


def test_metrics_count_tokens_and_sequences():
    drawn = with_gaps([log(2), 0.0], [0.0, 0.0, 0.0], [])
    metrics = TokenGate("k1", "token", 0.5)(drawn.tokens, drawn.token_scores).metrics
    assert metrics == pytest.approx({"gate_statistic": log(2) / 5, "gate_masked": 0.2, "gate_dropped": 0.0})
    metrics = TokenGate("k1", "max", 0.5)(drawn.tokens, drawn.token_scores).metrics
    assert metrics == pytest.approx(
        {"gate_statistic": 2 * log(2) / 5, "gate_masked": 0.4, "gate_dropped": 0.5}
    )


@given(st.sampled_from(sorted(GATES)))
def test_a_sequence_is_an_episode_however_often_its_history_was_rewritten(name):
    gaps = [0.1, 0.3, -0.1, 0.2]
    unsplit = with_gaps(gaps, specs=[EpisodeSpec([2, 2])])
    split = with_gaps(gaps, specs=[EpisodeSpec([2, 2], split=1)])
    first, second = (GATES[name](b.tokens, b.token_scores).is_open_N.tolist() for b in (unsplit, split))
    assert first == second


@given(drawn=batches())
def test_in_stages_a_token_has_its_own_weight_where_the_gate_of_its_sequence_is_open(drawn):
    name = ("k3", "mean")
    factors_N, metrics, clipped_N = InStages(Tis(1.2), GATES[name])(drawn.tokens, drawn.token_scores)
    flat = [gap for gaps in gaps_of(drawn) for gap in gaps]
    is_open = naive_is_open(name, drawn)
    expected = [min(exp(gap), 1.2) * is_in for gap, is_in in zip(flat, is_open, strict=True)]
    assert factors_N.tolist() == pytest.approx(expected, rel=1e-5)
    changed = [exp(gap) > 1.2 or not is_in for gap, is_in in zip(flat, is_open, strict=True)]
    assert clipped_N.tolist() == changed
    assert {"tis", "tis_factor", "gate_masked", "gate_statistic"} <= metrics.keys()


@given(drawn=batches())
def test_normalised_weights_have_a_mean_of_one_and_keep_their_proportions(drawn):
    plain = Tis(1.2)(drawn.tokens, drawn.token_scores).factors_N
    factors_N, metrics, _ = InStages(Tis(1.2), None, "token")(drawn.tokens, drawn.token_scores)
    if len(plain):
        assert factors_N.mean() == pytest.approx(1.0)
        assert factors_N * metrics["correction_norm"] == pytest.approx(plain)


def test_weights_of_sequences_count_once_each_and_what_a_gate_masks_counts_too():
    drawn = with_gaps([log(1.5), 0.0, 0.0], [0.0], [log(0.5)])
    weight = Mis("sequence", "truncate", 0.1, 4.0)
    norm = (1.5 + 1 + 0.5) / 3
    factors_N = InStages(weight, None, "sequence")(drawn.tokens, drawn.token_scores).factors_N
    assert factors_N == pytest.approx([1.5 / norm] * 3 + [1 / norm, 0.5 / norm])
    gate = TokenGate("k1", "max", 0.3)
    factors_N = InStages(weight, gate, "sequence")(drawn.tokens, drawn.token_scores).factors_N
    assert factors_N == pytest.approx([0.0] * 3 + [1 / norm, 0.5 / norm])


def test_weights_that_are_all_zero_stay_so():
    drawn = with_gaps([3.0], [3.0])
    for counted in ("token", "sequence"):
        masked = InStages(Mis("token", "mask"), None, counted)
        assert masked(drawn.tokens, drawn.token_scores).factors_N.tolist() == [0.0, 0.0]


@given(drawn=batches(gap=1e4))
def test_huge_gaps_stay_finite(drawn):
    for gate in GATES.values():
        corrected = InStages(Tis(), gate, "token")(drawn.tokens, drawn.token_scores)
        assert np.all(np.isfinite(corrected.factors_N))
        assert np.all(np.isfinite(list(corrected.metrics.values())))


@pytest.mark.parametrize("gate", [None, *GATES.values()], ids=str)
@pytest.mark.parametrize("specs", [[EpisodeSpec([0])], []])
def test_without_trainable_tokens_there_is_nothing_to_mask(gate, specs):
    drawn = batch(specs)
    for counted in ("token", "sequence", None):
        corrected = InStages(Tis(), gate, counted)(drawn.tokens, drawn.token_scores)
        assert not len(corrected.factors_N)
        assert set(corrected.metrics.values()) == {0.0}


@pytest.mark.parametrize("gate", GATES.values(), ids=str)
def test_with_a_gate_the_contract_of_estimators_holds(gate):
    check_estimator(Adjusted(GroupRelative(), correction=InStages(Tis(), gate, "token")))


@pytest.mark.parametrize(
    "settings",
    [
        {"upper": 0.0},
        {"upper": -1.0, "lower": -2.0},
        {"upper": 0.5, "lower": 0.5},
        {"upper": float("nan")},
        {"statistic": "k4"},
        {"over": "sequence"},
    ],
)
def test_gates_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match="gate"):
        TokenGate(**settings)
