"""Networks beside the policy: a critic that learns, and two that only say what they think."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from agentrl.losses import PolicyLoss, ValueLoss
from agentrl.trainer.plan import Learning, critic_metrics, step_metrics
from agentrl.trainer.torch import AuxiliaryModels, Critic, critic_over
from agentrl.types import Credit
from tests.trainer.tiny import batch, gradients_of, llama, qwen3, settings, trainer

MAKERS = [qwen3, lambda: qwen3(tied=False), llama]


def with_returns(train_batch, seed=3):
    """The batch with targets for a critic, and what it said of the tokens before."""
    rng = np.random.default_rng(seed)
    returns, values = (
        tuple((s.loss_mask * rng.normal(size=len(s))).astype(np.float32) for s in train_batch.samples)
        for _ in "ab"
    )
    credit = Credit(train_batch.credit.advantages, train_batch.credit.weights, returns)
    return dataclasses.replace(
        train_batch, credit=credit, scores=dataclasses.replace(train_batch.scores, values=values)
    )


def critic_of(model, loss=None, warmup=0, **changes):
    network = critic_over(model)
    return Critic(network, Learning(loss or ValueLoss(), settings(**changes), 10), warmup=warmup)


def onloaded(critic):
    """A critic that expects something."""
    with torch.no_grad():
        torch.manual_seed(5)
        critic.network.get_output_embeddings().weight.normal_()
    return critic


def separate_values(network, sample):
    """What the critic says before each token of one sequence, from its hidden states."""
    ids = torch.tensor(sample.token_ids.tolist())[None]
    states = network.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return (states @ network.get_output_embeddings().weight[0])[:-1]


@pytest.mark.parametrize("make", MAKERS)
async def test_a_critic_begins_with_zero_and_shares_nothing(make):
    model, train_batch = make(), batch()
    critic = critic_of(model)
    torch_trainer = trainer(model, auxiliary=AuxiliaryModels(critic=critic))
    scores = await torch_trainer.score(train_batch.samples, ("values",))
    assert all(not values.any() for values in scores.values)
    assert [old.tolist() for old in scores.proximal] == [s.logprobs.tolist() for s in train_batch.samples]
    before = [p.clone() for p in model.parameters()]
    critic.learn(with_returns(train_batch))
    assert any((onloaded(critic).network.get_output_embeddings().weight != 0).flatten())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not {p.data_ptr() for p in model.parameters()} & {
        p.data_ptr() for p in critic.network.parameters()
    }


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("max_tokens", [1, 11, 1000])
async def test_values_are_read_from_the_state_before_each_token(make, max_tokens):
    model, train_batch = make(), batch()
    critic = onloaded(critic_of(model))
    torch_trainer = trainer(model, max_tokens_per_gpu=max_tokens, auxiliary=AuxiliaryModels(critic=critic))
    scores = await torch_trainer.score(train_batch.samples, ["values"])
    for sample, values in zip(train_batch.samples, scores.values, strict=True):
        expected = np.zeros(len(sample))
        if len(sample) > 1:
            expected[1:] = separate_values(critic.network, sample).detach().numpy() * sample.loss_mask[1:]
        assert values == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("max_tokens", [1, 11, 1000])
async def test_the_critics_gradient_is_that_of_single_sequences(make, max_tokens):
    train_batch = with_returns(batch())
    critic = onloaded(critic_of(make(), ValueLoss(value_clip=0.3), max_tokens_per_gpu=max_tokens))
    network, total = critic.network, torch.zeros((), dtype=torch.float64)
    for index, sample in enumerate(train_batch.samples):
        if len(sample) < 2:
            continue
        values = separate_values(network, sample)
        for t in np.flatnonzero(sample.loss_mask):
            value, target = values[t - 1], float(train_batch.credit.returns[index][t])
            old = float(train_batch.scores.values[index][t])
            near = value.clamp(old - 0.3, old + 0.3)
            term = torch.maximum((value - target) ** 2, (near - target) ** 2) / 2
            total = total + float(train_batch.credit.weights[index][t]) * term
    total.backward()
    expected = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    with gradients_of(network) as actual:
        critic.learn(train_batch)
    assert "lm_head.weight" in expected
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


async def test_a_critic_learns_what_to_expect_and_says_how_well():
    train_batch = with_returns(batch())
    critic = critic_of(qwen3(), ValueLoss(value_clip=None), lr=3e-3)
    reports = [critic_metrics(step_metrics([critic.learn(train_batch)], train_batch)) for _ in range(60)]
    assert reports[-1]["value_loss"] < 0.2 * reports[0]["value_loss"]
    assert reports[0]["value_explained_variance"] == pytest.approx(0, abs=1e-6)
    assert 0.7 < reports[-1]["value_explained_variance"] <= 1
    names = {"value_loss", "value_clipfrac", "value_explained_variance"}
    assert set(reports[0]) == names | {"critic_grad_norm", "critic_lr", "critic_skipped_steps"}


async def test_the_critic_may_learn_alone_at_first():
    model, train_batch = qwen3(), with_returns(batch())
    torch_trainer = trainer(model, auxiliary=AuxiliaryModels(critic=critic_of(model, warmup=2)))
    before = [p.clone() for p in model.parameters()]
    for step in range(3):
        report = await torch_trainer.update(train_batch)
        same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert same == (step < 2)
        assert ("train/pg_loss" in report.metrics) == (step == 2)
        assert "train/value_loss" in report.metrics


async def test_a_batch_for_the_critic_alone_moves_nothing_else_and_counts_for_no_warm_up():
    model, train_batch = qwen3(), with_returns(batch())
    critic = critic_of(model, warmup=1, lr=1e-2)
    torch_trainer = trainer(model, auxiliary=AuxiliaryModels(critic=critic))
    before = [p.clone() for p in model.parameters()]
    values = [p.clone() for p in critic.network.parameters()]
    for _ in range(3):
        report = await torch_trainer.update(dataclasses.replace(train_batch, critic_only=True))
        assert "train/pg_loss" not in report.metrics
        assert "train/value_loss" in report.metrics
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(values, critic.network.parameters(), strict=True))
    reports = [await torch_trainer.update(train_batch) for _ in range(2)]
    assert ["train/pg_loss" in report.metrics for report in reports] == [False, True]


async def test_each_role_is_scored_by_its_own_network_and_those_that_are_frozen_stay():
    model, train_batch = qwen3(), batch()
    ref, teacher = qwen3(), llama()
    torch_trainer = trainer(model, lr=1e-2, auxiliary=AuxiliaryModels(ref=ref, teacher=teacher))
    first = await torch_trainer.score(train_batch.samples, ("old", "ref", "teacher"))
    for old, close in zip(first.proximal, first.ref, strict=True):
        assert old == pytest.approx(close, abs=1e-6), "it begins as the policy"
    assert not any(np.allclose(a, b) for a, b in zip(first.proximal, first.teacher, strict=True) if a.any())
    expected = await trainer(llama()).score(train_batch.samples)
    assert all(np.array_equal(a, b) for a, b in zip(first.teacher, expected.proximal, strict=True))
    await torch_trainer.update(train_batch)
    second = await torch_trainer.score(train_batch.samples, ("old", "ref", "teacher"))
    assert all(np.array_equal(a, b) for a, b in zip(first.ref, second.ref, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(first.teacher, second.teacher, strict=True))
    assert not all(np.allclose(a, b) for a, b in zip(first.proximal, second.proximal, strict=True))


@pytest.mark.parametrize("share", [1.0, 0.25])
async def test_a_reference_moves_towards_the_policy_and_is_a_part_of_the_saved_state(tmp_path, share):
    def fresh():
        ref = qwen3()
        with torch.no_grad():
            for parameter in ref.parameters():
                parameter.mul_(1.5)
        return trainer(qwen3(), lr=1e-2, auxiliary=AuxiliaryModels(ref=ref, moves_reference=True)), ref

    (torch_trainer, ref), train_batch = fresh(), batch()
    policy, before = qwen3(), [p.clone() for p in ref.parameters()]
    await torch_trainer.move_reference(share)
    for moved, old, new in zip(ref.parameters(), before, policy.parameters(), strict=True):
        torch.testing.assert_close(moved, share * new + (1 - share) * old)
    await torch_trainer.update(train_batch)
    await torch_trainer.move_reference(share)
    expected = await torch_trainer.score(train_batch.samples, ("ref",))
    await (await torch_trainer.save_state(str(tmp_path / "state")))
    await torch_trainer.close()

    again, _ = fresh()
    await again.load_state(str(tmp_path / "state"))
    scores = await again.score(train_batch.samples, ("ref",))
    assert [s.tolist() for s in scores.ref] == [s.tolist() for s in expected.ref]
    await again.close()


async def test_a_reference_that_stays_is_not_moved():
    with pytest.raises(ValueError, match="does not move"):
        await trainer(qwen3(), auxiliary=AuxiliaryModels(ref=qwen3())).move_reference(0.5)


@pytest.mark.parametrize("role", ["ref", "teacher", "values"])
async def test_a_role_that_nobody_has_is_refused(role):
    with pytest.raises(ValueError, match=f"no network in the role `{role}`"):
        await trainer(qwen3()).score(batch().samples, (role,))


async def test_an_entropy_bonus_reaches_the_weights():
    gradients = []
    for coef in (0.0, 0.5):
        model = qwen3()
        with gradients_of(model) as actual:
            report = await trainer(model, PolicyLoss(entropy_coef=coef)).update(batch())
        gradients.append(actual)
        assert report.metrics["train/entropy_loss"] > 0
    assert any(not torch.allclose(a, gradients[1][name]) for name, a in gradients[0].items())
