"""Logprobs over the ids that a cut kept: outputs by loops, and the gradient of the sampled policy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.losses import LossInputs, OutputHead, PolicyLoss, Targets, logprobs_and_entropy
from agentrl.types import Extra

VOCAB = 7


def by_loops(logits, target, temperature, kept):
    """Logprob, entropy and sum of squares of one token, over its kept ids; all ids where there are none."""
    ids = kept or list(range(len(logits)))
    exps = [math.exp(logits[k] / temperature) for k in ids]
    pis = [e / sum(exps) for e in exps]
    return (
        math.log(pis[ids.index(target)]),
        -sum(p * math.log(p) for p in pis),
        sum(p * p for p in pis),
    )


@st.composite
def cases(draw):
    """Logits, temperatures, targets and kept ids, some tokens without any."""
    number = draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    targets = rng.integers(0, VOCAB, number)
    kept = [
        sorted({int(target), *rng.integers(0, VOCAB, rng.integers(0, VOCAB)).tolist()})
        if rng.random() < 0.7
        else []
        for target in targets
    ]
    return rng.normal(0, 2, (number, VOCAB)), rng.uniform(0.5, 1.5, number), targets, kept


def scored(leaf, temperature, targets, kept, **options):
    extra = Extra.of_lists([np.array(ids, np.int32) for ids in kept])
    parts = Targets(torch.tensor(targets), torch.tensor(temperature), extra)
    return logprobs_and_entropy(leaf, OutputHead(torch.eye(VOCAB, dtype=leaf.dtype)), parts, **options)


@given(case=cases(), max_logits=st.integers(1, 70))
def test_any_chunks_give_the_numbers_of_loops(case, max_logits):
    logits, temperature, targets, kept = case
    with torch.no_grad():
        outputs = scored(torch.tensor(logits), temperature, targets, kept, max_logits=max_logits)
    expected = [by_loops(*row) for row in zip(logits, targets, temperature, kept, strict=True)]
    actual = zip(outputs.logp_N, outputs.entropy_N, outputs.sum_pi_squared_N, strict=True)
    np.testing.assert_allclose(list(actual), expected, atol=1e-12)


@given(case=cases(), max_logits=st.integers(1, 70))
def test_gradients_are_those_of_finite_differences_and_0_at_what_was_cut(case, max_logits):
    logits, temperature, targets, kept = case
    pull = np.random.default_rng(0).normal(0, 3, (2, len(targets)))
    leaf = torch.tensor(logits, requires_grad=True)
    outputs = scored(leaf, temperature, targets, kept, max_logits=max_logits, entropy_gradient=True)
    (torch.tensor(pull[0]) * outputs.logp_N + torch.tensor(pull[1]) * outputs.entropy_N).sum().backward()
    for n, v in np.ndindex(*logits.shape):
        values = []
        for step in (1e-6, -1e-6):
            row = logits[n].copy()
            row[v] += step
            values.append(np.dot(by_loops(row, targets[n], temperature[n], kept[n])[:2], pull[:, n]))
        assert float(leaf.grad[n, v]) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-7)
        if kept[n] and v not in kept[n]:
            assert float(leaf.grad[n, v]) == 0.0


def test_a_token_that_alone_was_kept_has_logprob_0_and_no_gradient():
    leaf = torch.randn(2, VOCAB, requires_grad=True)
    outputs = scored(leaf, [0.7, 1.0], [3, 5], [[3], [5]], entropy_gradient=True)
    assert outputs.logp_N.tolist() == [0.0, 0.0]
    (1e4 * (outputs.logp_N + outputs.entropy_N)).sum().backward()
    assert outputs.entropy_N.tolist() == [0.0, 0.0]
    assert torch.equal(leaf.grad, torch.zeros(2, VOCAB))


@pytest.mark.parametrize("max_logits", [10_000, 2 * VOCAB])
def test_tokens_without_kept_ids_are_scored_bit_for_bit_as_ever(max_logits):
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    targets, temperature = torch.arange(6), torch.full((6,), 0.9)
    plain, mixed = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    without = logprobs_and_entropy(
        plain,
        OutputHead(torch.eye(VOCAB)),
        Targets(targets, temperature),
        max_logits=max_logits,
        entropy_gradient=True,
    )
    # The last one was cut; its neighbours in the chunk were not.
    outputs = scored(
        mixed,
        temperature.numpy(),
        targets.tolist(),
        [[]] * 5 + [[5, 2]],
        max_logits=max_logits,
        entropy_gradient=True,
    )
    for each in (without, outputs):
        (each.logp_N + each.entropy_N).sum().backward()
    assert torch.equal(outputs.logp_N[:5], without.logp_N[:5])
    assert torch.equal(outputs.entropy_N[:5], without.entropy_N[:5])
    assert torch.equal(mixed.grad[:5], plain.grad[:5])
    assert outputs.logp_N[5] > without.logp_N[5]


@pytest.mark.parametrize("replays", [True, False])
def test_the_expected_gradient_is_that_of_the_truncated_sampler(replays):
    """All episodes of two tokens, each weighed by the probability that the truncated sampler plays it.

    The second token's logits and mask depend on the first token. Without masks the expectation is another.
    """
    rng = np.random.default_rng(4)
    tables = rng.normal(0, 1.5, (1 + VOCAB, VOCAB))
    kept = [sorted(rng.choice(VOCAB, 3, replace=False).tolist()) for _ in range(1 + VOCAB)]
    reward = rng.normal(size=(VOCAB, VOCAB))

    def prob(table, state, token):
        return math.exp(by_loops(table[state], token, 1.0, kept[state])[0])

    def expected_reward(table):
        return sum(
            prob(table, 0, a) * prob(table, 1 + a, b) * reward[a, b] for a in kept[0] for b in kept[1 + a]
        )

    leaf = torch.tensor(tables, requires_grad=True)
    for a, b in itertools.product(range(VOCAB), repeat=2):
        if a not in kept[0] or b not in kept[1 + a]:
            continue
        states = [0, 1 + a]
        probability = prob(tables, 0, a) * prob(tables, 1 + a, b)
        masks = [kept[state] for state in states] if replays else [[], []]
        outputs = scored(leaf[states], [1.0, 1.0], [a, b], masks)
        old = outputs.logp_N.detach()
        inputs = LossInputs(
            old,
            old,
            torch.full((2,), reward[a, b], dtype=torch.float64),
            torch.full((2,), probability, dtype=torch.float64),
            torch.zeros(2, dtype=torch.int64),
        )
        PolicyLoss()(outputs, inputs).sum.backward()
    differences = np.zeros_like(tables)
    for place in np.ndindex(*tables.shape):
        nudge = np.zeros_like(tables)
        nudge[place] = 1e-6
        differences[place] = (expected_reward(tables + nudge) - expected_reward(tables - nudge)) / 2e-6
    gap = np.abs(-leaf.grad.numpy() - differences).max()
    assert (gap < 1e-8) if replays else (gap > 1e-2)
