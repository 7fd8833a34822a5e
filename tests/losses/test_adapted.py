"""What a step adds to the policy loss: other coefficients, and tokens that are held where they are."""

import math

import pytest

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.assembly.algorithm import build_loss
from agentrl.losses import KlTerm, PolicyLoss, needs_entropy_gradient
from agentrl.types import Coefficients
from tests.losses.oracle import evaluate, slopes, tensors
from tests.losses.test_objectives import VARIANTS, random_tokens, result


def test_coefficients_of_the_step_stand_in_for_those_of_the_loss():
    outputs, inputs = tensors(random_tokens(2))
    adapted = inputs._replace(coefficients=Coefficients(entropy=0.2, kl=0.5))
    loss = PolicyLoss(entropy_coef=0.01, kl=KlTerm(0.1), adapts_entropy=True)
    expected = PolicyLoss(entropy_coef=0.2, kl=KlTerm(0.5))(outputs, inputs).sum
    assert float(loss(outputs, adapted).sum.detach()) == pytest.approx(float(expected.detach()))
    only_entropy = inputs._replace(coefficients=Coefficients(entropy=0.0))
    expected = PolicyLoss(kl=KlTerm(0.1))(outputs, inputs).sum
    assert float(loss(outputs, only_entropy).sum.detach()) == pytest.approx(float(expected.detach()))
    assert [needs_entropy_gradient(loss) for loss in (PolicyLoss(), PolicyLoss(adapts_entropy=True))] == [
        False,
        True,
    ]


@pytest.mark.parametrize("name", ["clip", "gspo", "vespo", "everything"])
def test_some_tokens_are_held_near_the_policy_before_the_update(name):
    loss, options = VARIANTS[name]
    tokens = [token._replace(held=0.7 * (i % 3 == 0)) for i, token in enumerate(random_tokens(1))]
    expected = evaluate(tokens, options)
    total, outputs, metrics = result(loss, tokens)
    assert total == pytest.approx(expected["loss"], rel=1e-9)
    assert outputs.logp_N.grad.tolist() == pytest.approx(slopes(tokens, options), rel=1e-5, abs=1e-8)
    assert float(metrics["kl_cov_loss"]) == pytest.approx(expected["held"])
    assert expected["held"] > 0


def test_where_tokens_are_held_the_ratio_is_not_clipped_unless_bounds_are_set():
    """arXiv 2505.22617: KL-Cov is -A ratio, and the penalty."""

    def bounds(**settings):
        loss = build_loss(AlgorithmConfig(entropy_control="kl_cov", **settings))
        return loss.eps_clip, loss.eps_clip_high

    low, high = bounds()
    assert low == 1.0
    # Ratios are computed up to exp(20).
    assert high > math.exp(20)
    assert bounds(eps_clip_high=0.4) == (1.0, 0.4)
    # That of another paper is a part of its objective.
    assert bounds(advantage_estimator="gspo") == (3e-4, 4e-4)
