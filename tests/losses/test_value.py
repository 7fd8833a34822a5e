"""The critic's loss against plain floats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.losses import LossInputs, TokenOutputs, ValueLoss, check_loss, explained_variance

number = st.floats(-5, 5)
batches = st.lists(st.tuples(number, number, number, st.floats(0, 1)), min_size=1, max_size=10)


def run(rows, clip, dtype=torch.float64):
    values, returns, before, weights = (torch.tensor(c, dtype=dtype) for c in zip(*rows, strict=True))
    values.requires_grad_()
    unused = torch.zeros(len(rows), dtype=dtype)
    inputs = LossInputs(
        unused, unused, unused, weights, torch.arange(len(rows)), returns_N=returns, old_values_N=before
    )
    output = ValueLoss(clip)(TokenOutputs(unused, unused, values), inputs)
    output.sum.backward()
    return output, values.grad


def term_of(value: float, target: float, before: float, clip: float | None) -> tuple[float, bool]:
    plain = (value - target) ** 2
    if clip is None:
        return plain / 2, False
    near = before - clip if value < before - clip else before + clip if value > before + clip else value
    return max(plain, (near - target) ** 2) / 2, (near - target) ** 2 > plain


@given(batches, st.sampled_from([None, 0.2, 1.0]))
def test_loss_and_metrics_agree_with_the_oracle(rows, clip):
    output, gradient = run(rows, clip)
    terms = [term_of(value, target, before, clip) for value, target, before, _ in rows]
    loss = sum(weight * term for (term, _), (*_, weight) in zip(terms, rows, strict=True))
    assert float(output.sum.detach()) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert gradient.isfinite().all()
    expected = {
        "value_loss": sum(term for term, _ in terms),
        "value_clipfrac": sum(clipped for _, clipped in terms),
        "value_target": sum(target for _, target, _, _ in rows),
        "value_target_squared": sum(target**2 for _, target, _, _ in rows),
        "value_error": sum(target - value for value, target, _, _ in rows),
        "value_error_squared": sum((target - value) ** 2 for value, target, _, _ in rows),
    }
    assert output.metrics.keys() == expected.keys()
    for name, metric in output.metrics.items():
        assert not metric.requires_grad
        assert float(metric) == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize(
    ("value", "target", "before", "slope"),
    [
        (1.0, 3.0, 1.0, -2.0),
        (1.5, 3.0, 1.0, 0.0),  # moved further than it may, towards the target: it waits
        (0.5, 3.0, 1.0, -2.5),  # moved away from the target: it comes back
        (3.5, 3.0, 1.0, 0.0),
        (1.1, 3.0, 1.0, -1.9),
    ],
)
def test_a_value_that_has_moved_far_enough_waits_and_one_that_went_astray_does_not(
    value, target, before, slope
):
    _, gradient = run([(value, target, before, 1.0)], 0.2)
    assert gradient.tolist() == pytest.approx([slope])
    _, gradient = run([(value, target, before, 1.0)], None)
    assert gradient.tolist() == pytest.approx([value - target])


def test_gradient_agrees_with_finite_differences():
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(30, 4, generator=generator, dtype=torch.float64).abs().tolist()
    _, gradient = run(rows, 0.2)
    for (value, target, before, weight), slope in zip(rows, gradient.tolist(), strict=True):
        up, down = (term_of(value + step, target, before, 0.2)[0] for step in (1e-6, -1e-6))
        assert slope == pytest.approx(weight * (up - down) / 2e-6, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("clip", [0.2, None])
def test_it_keeps_the_contract(clip):
    check_loss(ValueLoss(clip))


def test_half_precision_is_promoted():
    output, _ = run([(1.0078125, 3.0, 1.0, 0.1)], 0.2, torch.bfloat16)
    assert output.sum.dtype == torch.float32
    assert float(output.metrics["value_error"]) == 3.0 - 1.0078125


def test_what_is_missing_is_asked_for():
    unused = torch.zeros(1)
    inputs = LossInputs(unused, unused, unused, unused, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="values_N and returns_N"):
        ValueLoss()(TokenOutputs(unused, unused), inputs)
    with pytest.raises(ValueError, match="values_N and returns_N"):
        ValueLoss()(TokenOutputs(unused, unused, unused), inputs)
    with pytest.raises(ValueError, match="old_values_N"):
        ValueLoss()(TokenOutputs(unused, unused, unused), inputs._replace(returns_N=unused))
    ValueLoss(None)(TokenOutputs(unused, unused, unused), inputs._replace(returns_N=unused))


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan, math.inf])
def test_a_clip_that_makes_no_sense_is_refused(clip):
    with pytest.raises(ValueError, match="value_clip must be above 0"):
        ValueLoss(clip)


def test_explained_variance_is_one_for_a_prophet_zero_for_the_mean_and_below_for_worse():
    returns = [1.0, 2.0, 4.0, 9.0]
    guesses = {1.0: returns, 0.0: [4.0] * 4, -3.0: [4.0 - (r - 4.0) for r in returns]}
    # One who is wrong by the same everywhere still tells good from bad.
    shifted = {expected: [value + 2.0 for value in values] for expected, values in guesses.items()}
    for expected, values in (*guesses.items(), *shifted.items()):
        output, _ = run([(v, r, v, 0.1) for v, r in zip(values, returns, strict=True)], None)
        means = {name: float(total) / len(returns) for name, total in output.metrics.items()}
        assert explained_variance(means) == pytest.approx(expected)


def test_equal_returns_leave_nothing_to_explain():
    output, _ = run([(value, 0.1, value, 0.1) for value in (0.3, 0.2, 0.7)], None)
    assert explained_variance({name: float(total) / 3 for name, total in output.metrics.items()}) == 0
    output, _ = run([(value, 0.0, value, 0.1) for value in (0.3, 0.2, 0.7)], None)
    assert explained_variance({name: float(total) / 3 for name, total in output.metrics.items()}) == 0
