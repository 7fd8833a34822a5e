"""The policy loss against a reference in plain Python floats, token by token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.losses import (
    LossInputs,
    LossKernel,
    LossOutput,
    OutputHead,
    PolicyLoss,
    Targets,
    TokenOutputs,
    logprobs_and_entropy,
)

logp = st.floats(-12, 0)
tokens = st.lists(st.tuples(logp, logp, logp, st.floats(-3, 3), st.floats(0, 1)), min_size=1, max_size=12)


def run(rows, **bounds) -> tuple[LossOutput, torch.Tensor]:
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]
    new, old, engine, advantages, weights = columns
    new.requires_grad_()
    outputs = TokenOutputs(new, torch.full_like(new, 0.25).detach())
    sequences = torch.arange(len(new))
    return PolicyLoss(**bounds)(outputs, LossInputs(old, engine, advantages, weights, sequences)), new


def reference(rows, low: float, high: float) -> dict[str, float]:
    total = {"loss": 0.0, "pg_loss": 0.0, "pg_clipfrac": 0.0, "ppo_kl": 0.0, "diff": 0.0}
    for new, old, engine, advantage, weight in rows:
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - low), 1 + high)
        surrogate = min(advantage * ratio, advantage * bounded)
        total["loss"] -= weight * surrogate
        total["pg_loss"] -= surrogate
        total["pg_clipfrac"] += advantage * bounded < advantage * ratio
        total["ppo_kl"] += old - new
        total["diff"] += abs(new - engine)
    return total


@given(tokens, st.floats(0.05, 0.5), st.floats(0.05, 0.9))
def test_loss_and_metrics_agree_with_the_reference(rows, low, high):
    output, _ = run(rows, eps_clip=low, eps_clip_high=high)
    expected = reference(rows, low, high)
    assert float(output.sum.detach()) == pytest.approx(expected["loss"], rel=1e-9, abs=1e-12)
    for name, key in {
        "pg_loss": "pg_loss",
        "pg_clipfrac": "pg_clipfrac",
        "ppo_kl": "ppo_kl",
        "train_rollout_logprob_abs_diff": "diff",
    }.items():
        assert float(output.metrics[name]) == pytest.approx(expected[key], rel=1e-9, abs=1e-9)
    assert float(output.metrics["entropy_loss"]) == pytest.approx(0.25 * len(rows))
    assert not any(metric.requires_grad for metric in output.metrics.values())


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.27, 1.0, True),
        (1.29, 1.0, False),
        (0.5, 1.0, True),
        (0.81, -1.0, True),
        (0.79, -1.0, False),
        (1.5, -1.0, True),
        (1.21, 1.0, True),
        (0.73, -1.0, False),
    ],
)
def test_the_upper_bound_lies_farther_out_than_the_lower(ratio, advantage, moves):
    output, new = run([(math.log(ratio), 0.0, 0.0, advantage, 0.5)], eps_clip=0.2, eps_clip_high=0.28)
    output.sum.backward()
    expected = -0.5 * advantage * ratio if moves else 0.0
    assert float(new.grad) == pytest.approx(expected)
    assert float(output.metrics["pg_clipfrac"]) == (not moves)


def test_on_policy_the_gradient_is_minus_weight_times_advantage():
    rows = [(-1.0, -1.0, -1.0, 2.0, 0.1), (-3.0, -3.0, -3.0, -0.5, 0.4)]
    output, new = run(rows)
    output.sum.backward()
    assert new.grad.tolist() == pytest.approx([-0.2, 0.2])
    assert float(output.metrics["ppo_kl"]) == 0
    assert float(output.metrics["pg_clipfrac"]) == 0


def test_a_token_that_became_infinitely_likelier_stays_finite():
    output, new = run([(0.0, -1e6, 0.0, -1.0, 1.0), (0.0, -1e6, 0.0, 0.0, 1.0), (-1e6, 0.0, 0.0, 1.0, 1.0)])
    output.sum.backward()
    assert math.isfinite(float(output.sum.detach()))
    assert torch.isfinite(new.grad).all()


def softmax_loss(table: np.ndarray, rows, temperature: float) -> float:
    """The whole way from logits to loss, in loops."""
    total = 0.0
    for state, target, before, advantage, weight in rows:
        logits = [value / temperature for value in table[state]]
        top = max(logits)
        logp = logits[target] - top - math.log(sum(math.exp(value - top) for value in logits))
        ratio = math.exp(logp - before)
        bounded = min(max(ratio, 0.8), 1.28)
        total -= weight * min(advantage * ratio, advantage * bounded)
    return total


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_gradient_agrees_with_finite_differences_on_a_table_of_logits(temperature):
    rng = np.random.default_rng(5)
    number, states, vocab = 40, 4, 6
    table = rng.normal(size=(states, vocab))
    chosen = rng.integers(0, states, number)
    targets = rng.integers(0, vocab, number)
    old = rng.normal(-1.8, 0.8, number)
    advantages, weights = rng.normal(size=number), rng.uniform(size=number)

    leaf = torch.tensor(table, requires_grad=True)
    outputs = logprobs_and_entropy(
        leaf[torch.tensor(chosen)],
        OutputHead(torch.eye(vocab, dtype=torch.float64)),
        Targets(torch.tensor(targets), torch.full((number,), temperature, dtype=torch.float64)),
    )
    arrays = [torch.tensor(array) for array in (old, old, advantages, weights)]
    output = PolicyLoss()(outputs, LossInputs(*arrays, torch.arange(number)))
    output.sum.backward()

    def loss_at(shifted: np.ndarray) -> float:
        rows = zip(chosen, targets, old, advantages, weights, strict=True)
        return softmax_loss(shifted, rows, temperature)

    assert float(output.sum.detach()) == pytest.approx(loss_at(table), rel=1e-12)
    for state in range(states):
        for word in range(vocab):
            nudge = np.zeros_like(table)
            nudge[state, word] = 1e-6
            slope = (loss_at(table + nudge) - loss_at(table - nudge)) / 2e-6
            assert float(leaf.grad[state, word]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"objective": "ppo"}, "objective must be one of clip, .*, got 'ppo'"),
        ({"eps_clip": 0.0}, "eps_clip must be above 0"),
        ({"eps_clip_high": math.nan}, "eps_clip_high must be above 0"),
        ({"eps_clip_c": 1.0}, "eps_clip_c must be above 1"),
        ({"eps_clip_c": 3.0, "objective": "cispo"}, "cispo has no dual clip; leave out eps_clip_c"),
        ({"eps_clip_c": 3.0, "objective": "sapo"}, "sapo has no dual clip"),
        ({"sapo_tau": (1.0, 0.0), "objective": "sapo"}, "sapo_tau must be above 0"),
        ({"vespo": (LossKernel(1.0, 1.0), LossKernel(0.0, 1.0))}, "vespo must be above 0"),
        ({"entropy_coef": math.inf}, "entropy_coef must be finite"),
        ({"opsm_delta": math.nan}, "opsm_delta must be finite"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        PolicyLoss(**settings)
