"""Losses of routers: the gradient of transformers' own load balance, however rows are cut and computed."""

from __future__ import annotations

import pytest
import torch

from agentrl.losses import PolicyLoss
from tests.engine.routes import routers_in
from tests.trainer.families import family
from tests.trainer.routes import router_losses
from tests.trainer.test_routing import KINDS, expect_gradients
from tests.trainer.tiny import batch, gradients_of, reference_gradient, siblings, trainer

AUX, Z = 0.7, 0.02


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("made", [batch, siblings])
@pytest.mark.parametrize("name", KINDS)
async def test_the_gradient_is_that_of_all_losses(name, made, recomputes):
    model, train_batch = family(name), made()
    expected_loss, plain = reference_gradient(model, train_batch, imitation=False)
    balance, squares = router_losses(model, train_batch.samples)
    (AUX * balance + Z * squares).backward()
    expected = {key: plain[key] + p.grad for key, p in model.named_parameters() if p.grad is not None}
    routers = {key for key in expected if key.endswith("gate.weight")}
    assert all((expected[key] - plain[key]).norm() > 0.05 * plain[key].norm() for key in routers)
    coefficients = {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}
    for max_tokens in (30, 1000):
        settings = {"max_tokens_per_gpu": max_tokens, "gradient_checkpointing": recomputes}
        fresh = family(name)
        with gradients_of(fresh) as actual:
            report = await trainer(fresh, PolicyLoss(), **settings, **coefficients).update(train_batch)
        expect_gradients(actual, {key: expected.get(key, plain[key]) for key in plain})
        layers = len(routers_in(model))
        assert report.metrics["train/moe_aux_loss"] == pytest.approx(balance.item() / layers, rel=1e-4)
        assert report.metrics["train/moe_z_loss"] == pytest.approx(squares.item() / layers, rel=1e-4)
        assert report.metrics["train/loss"] == pytest.approx(expected_loss, rel=1e-4)


async def test_without_coefficients_the_gradient_is_that_of_the_algorithm_alone():
    model = family("qwen3_moe")
    _, expected = reference_gradient(model, batch(), imitation=False)
    with gradients_of(model) as actual:
        report = await trainer(model, PolicyLoss()).update(batch())
    expect_gradients(actual, expected)
    assert "train/moe_aux_loss" not in report.metrics


async def test_the_load_becomes_even():
    """A router that sends all tokens to two experts: the loss alone spreads them."""
    model = family("mixtral")
    with torch.no_grad():
        for router in routers_in(model):
            router.weight.mul_(torch.tensor([[3.0], [3.0], [0.1], [0.1]]))
    learner = trainer(model, moe_aux_loss_coeff=1.0, lr=0.01)
    balances = [(await learner.update(batch())).metrics["train/moe_aux_loss"] for _ in range(20)]
    assert balances[-1] < balances[0]
    assert balances[-1] < 1.2
