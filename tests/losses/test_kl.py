"""KL estimates: values in plain floats, and what they and their gradients are on average, exactly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.losses import KlTerm, k1, k2, k3, low_var_kl

ESTIMATES = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}
POLICY = torch.tensor([0.3, -0.4, 1.1, 0.0], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([0.9, 0.2, -0.3, 0.4], dtype=torch.float64), -1)
OLD = torch.log_softmax(torch.tensor([-0.5, 0.6, 0.4, 0.1], dtype=torch.float64), -1)


def tensor(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


@given(st.floats(-19, 12), st.floats(-12, 12))
def test_each_estimate_is_its_formula(logp, ref):
    difference = logp - ref
    odds = math.exp(ref - logp) if ref - logp < 20 else math.exp(20)
    floor = max(difference, -20)
    expected = {"k1": difference, "k2": difference**2 / 2, "k3": odds - 1 + floor}
    expected["low_var_kl"] = max(-10.0, min(10.0, expected["k3"]))
    for kind, estimate in ESTIMATES.items():
        assert float(estimate(tensor(logp), tensor(ref))) == pytest.approx(expected[kind], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("logp", "sign"), [(-1.0, 1), (-3.0, -1)])
def test_the_difference_is_positive_where_the_policy_likes_the_token_better(logp, sign):
    assert float(k1(tensor(logp), tensor(-2.0))) == sign


def test_the_formulas_differ_where_they_should():
    values = {kind: float(estimate(tensor(-4.0), tensor(-0.5))) for kind, estimate in ESTIMATES.items()}
    assert values["low_var_kl"] == 10
    assert values["k3"] == pytest.approx(math.exp(3.5) - 4.5)
    assert len(set(values.values())) == 4


def test_k3_keeps_its_digits_in_single_precision_near_zero():
    gap = torch.tensor([1e-3])
    assert float(k3(gap, torch.zeros(1))) == pytest.approx(5e-7, rel=1e-3)


def divergence(logp: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (logp.exp() * (logp - other)).sum()


def test_on_average_over_the_policys_own_tokens_k1_and_k3_are_the_divergence():
    logp = torch.log_softmax(POLICY, -1)
    exact = float(divergence(logp, REFERENCE))
    averages = {
        kind: float((logp.exp() * estimate(logp, REFERENCE)).sum()) for kind, estimate in ESTIMATES.items()
    }
    assert averages["k1"] == pytest.approx(exact)
    assert averages["k3"] == pytest.approx(exact)
    assert averages["k2"] != pytest.approx(exact, rel=0.02)


def average_gradient(term: KlTerm, sampled_from: torch.Tensor) -> torch.Tensor:
    """The mean gradient of the penalty over all tokens, each as likely as `sampled_from` says."""
    logits = POLICY.clone().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    (sampled_from.exp() * term.estimate(logp, REFERENCE, OLD)).sum().backward()
    return logits.grad


def exact_gradient(reverse: bool) -> torch.Tensor:
    logits = POLICY.clone().requires_grad_()
    logp = torch.log_softmax(logits, -1)
    (divergence(logp, REFERENCE) if reverse else divergence(REFERENCE, logp)).backward()
    return logits.grad


def test_what_the_gradients_are_on_average_is_what_the_docstrings_say():
    own = torch.log_softmax(POLICY, -1)
    torch.testing.assert_close(average_gradient(KlTerm(1.0, "k1"), own), torch.zeros_like(POLICY))
    torch.testing.assert_close(average_gradient(KlTerm(1.0, "k2"), own), exact_gradient(reverse=True))
    torch.testing.assert_close(average_gradient(KlTerm(1.0, "k3"), own), exact_gradient(reverse=False))


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_unbiased_the_gradient_is_that_of_the_divergence_also_for_another_policys_tokens(kind):
    exact = exact_gradient(reverse=True)
    torch.testing.assert_close(average_gradient(KlTerm(1.0, kind, unbiased=True), OLD), exact)
    assert not torch.allclose(average_gradient(KlTerm(1.0, kind), OLD), exact, atol=1e-3)


def test_unbiased_estimates_are_right_on_average_for_another_policys_tokens():
    logp = torch.log_softmax(POLICY, -1)
    exact = float(divergence(logp, REFERENCE))
    for kind in ("k1", "k3"):
        estimate = KlTerm(1.0, kind, unbiased=True).estimate(logp, REFERENCE, OLD)
        assert float((OLD.exp() * estimate).sum()) == pytest.approx(exact)


def slope_of(term: KlTerm, logp: float, ref: float, old: float) -> float:
    leaf = tensor(logp).requires_grad_()
    term.estimate(leaf, tensor(ref), tensor(old)).backward()
    return float(leaf.grad)


@pytest.mark.parametrize(
    ("kind", "unbiased", "difference", "slope"),
    [
        ("k3", False, -19.0, 1 - math.exp(19)),
        ("k3", False, -21.0, 0.0),
        ("k3", True, -21.0, -21.0),
        ("k3", True, 30.0, 30.0),
        ("low_var_kl", False, -2.0, 1 - math.exp(2)),
        ("low_var_kl", False, -3.0, 0.0),
        ("low_var_kl", False, 12.0, 0.0),
        ("low_var_kl", True, -2.0, -2.0),
        ("low_var_kl", True, -3.0, 0.0),
        ("low_var_kl", True, 12.0, 0.0),
        ("k1", True, 2.0, 3.0),
        ("k2", True, 2.0, 4.0),
    ],
)
def test_where_an_estimate_is_cut_off_nothing_pulls_the_wrong_way(kind, unbiased, difference, slope):
    term = KlTerm(1.0, kind, unbiased)
    assert slope_of(term, -1.0, -1.0 - difference, -1.0) == pytest.approx(slope, rel=1e-9)


def test_unbiased_k3_keeps_its_gradient_in_single_precision():
    leaf = torch.tensor([-18.0], requires_grad=True)
    KlTerm(1.0, "k3", unbiased=True).estimate(leaf, torch.zeros(1), torch.tensor([-18.0])).backward()
    assert float(leaf.grad) == pytest.approx(-18.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"coef": -0.1}, "coef must be at least 0"),
        ({"coef": math.nan}, "coef must be at least 0"),
        ({"coef": math.inf}, "coef must be at least 0"),
        ({"coef": 0.1, "kind": "k4"}, "kind must be one of k1, k2, k3, low_var_kl, got 'k4'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        KlTerm(**settings)
