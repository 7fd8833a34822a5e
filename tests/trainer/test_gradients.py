"""The gradient of a packed batch against one sequence at a time, written down in another way."""

import pytest
import torch

from agentrl.losses import PolicyLoss, sft_loss
from agentrl.types import Credit, TrainBatch
from tests.trainer.tiny import batch, gradients_of, llama, qwen2, qwen3, reference_gradient, siblings, trainer


@pytest.mark.parametrize("make", [qwen3, qwen2, llama])
@pytest.mark.parametrize("loss", [PolicyLoss(), sft_loss])
@pytest.mark.parametrize("max_tokens", [1, 7, 20, 10_000])
async def test_packed_gradients_are_those_of_single_sequences(make, loss, max_tokens):
    model, train_batch = make(), batch()
    expected_loss, expected = reference_gradient(model, train_batch, imitation=loss is sft_loss)

    with gradients_of(model) as actual:
        report = await trainer(model, loss, max_tokens_per_gpu=max_tokens).update(train_batch)

    assert report.metrics["train/loss"] == pytest.approx(expected_loss, rel=1e-9)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(actual[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("make", [qwen3, qwen2, llama])
@pytest.mark.parametrize("recomputed", [False, True])
async def test_what_siblings_begin_with_is_computed_once(make, recomputed):
    model, train_batch = make(), siblings()
    expected_loss, expected = reference_gradient(model, train_batch, imitation=False)
    computed = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, __: computed.append(ids[0].numel()))
    learner = trainer(model, max_tokens_per_gpu=10_000, gradient_checkpointing=recomputed)
    computed.clear()
    with gradients_of(model) as actual:
        report = await learner.update(train_batch)
    # The last token of a sequence predicts nothing: 1 of 2, 5, 5, 3, 7 and 4 is left out.
    assert computed == [3 + 2 * 4 + (1 + 4 + 4 + 2 + 6 + 3) - 2]
    assert report.metrics["train/loss"] == pytest.approx(expected_loss, rel=1e-9)
    for name, gradient in expected.items():
        # Norms are in fp32, whatever the weights are; gradients of siblings are added up before them.
        most = float(gradient.abs().max())
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=2e-6 * most, msg=name)


async def test_metrics_are_the_same_for_every_packing():
    reports = [await trainer(qwen3(), max_tokens_per_gpu=most).update(batch()) for most in (1, 5, 19, 10_000)]
    for report in reports[1:]:
        assert report.metrics == pytest.approx(reports[0].metrics, rel=1e-9)
        assert report.num_tokens == reports[0].num_tokens == 46


async def test_in_fp32_a_packing_moves_the_gradient_by_rounding_only():
    gradients = []
    for most in (6, 10_000):
        model = qwen3(torch.float32)
        with gradients_of(model) as actual:
            await trainer(model, max_tokens_per_gpu=most).update(batch())
        gradients.append(dict(actual))
    for name, gradient in gradients[0].items():
        error = (gradient - gradients[1][name]).norm() / gradient.norm()
        assert error < 1e-5, name


async def test_only_masked_tokens_pull_however_large_the_rest():
    train_batch = batch()
    loud = tuple(
        a + 1e3 * (~s.loss_mask)
        for a, s in zip(train_batch.credit.advantages, train_batch.samples, strict=True)
    )
    louder = tuple(
        w + 1e3 * (~s.loss_mask) for w, s in zip(train_batch.credit.weights, train_batch.samples, strict=True)
    )
    noisy = TrainBatch(train_batch.samples, train_batch.scores, Credit(loud, louder))
    gradients = []
    for candidate in (train_batch, noisy):
        model = qwen3()
        with gradients_of(model) as actual:
            await trainer(model).update(candidate)
        gradients.append(dict(actual))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


async def test_bf16_changes_the_gradient_a_little_and_keeps_its_direction():
    gradients = []
    for bf16 in (False, True):
        model = qwen3(torch.float32)
        with gradients_of(model) as actual:
            await trainer(model, sft_loss, bf16=bf16).update(batch())
        gradients.append(torch.cat([g.flatten() for g in actual.values()]))
    assert not torch.equal(*gradients)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


async def test_old_logprobs_from_the_trainer_itself_make_every_ratio_one():
    model, train_batch = qwen3(), batch()
    torch_trainer = trainer(model)
    again = TrainBatch(
        train_batch.samples, await torch_trainer.score(train_batch.samples), train_batch.credit
    )
    report = await torch_trainer.update(again)
    assert report.metrics["train/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert report.metrics["train/pg_clipfrac"] == 0
