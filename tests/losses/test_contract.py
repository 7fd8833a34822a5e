"""The contract: losses of ours keep it, and each way of breaking it is told by its sentence."""

import pytest
import torch

from agentrl.losses import LossOutput, PolicyLoss, ValueLoss, check_loss, sft_loss


def good(outputs, inputs):
    term = -inputs.advantages_N * outputs.logp_N
    return LossOutput((inputs.weights_N * term).sum(), {"term": term.detach().sum()})


def less_of_older_tokens(outputs, inputs):
    return good(outputs, inputs._replace(weights_N=inputs.weights_N * 0.5**inputs.staleness_N))


def mean(outputs, inputs):
    total, metrics = good(outputs, inputs)
    return LossOutput(total / len(inputs.weights_N), metrics)


def batch_centred(outputs, inputs):
    centred = inputs.advantages_N - inputs.advantages_N.mean()
    return LossOutput((inputs.weights_N * -centred * outputs.logp_N).sum(), {})


def same_value_other_gradient(outputs, inputs):
    total, metrics = good(outputs, inputs)
    pull = inputs.advantages_N.mean() * (outputs.logp_N - outputs.logp_N.detach()).sum()
    return LossOutput(total + inputs.weights_N.sum() * pull, metrics)


def weightless(outputs, inputs):
    return LossOutput((-inputs.advantages_N * outputs.logp_N).sum(), {})


def mean_metric(outputs, inputs):
    total, _ = good(outputs, inputs)
    return LossOutput(total, {"entropy": outputs.entropy_N.detach().mean()})


def metric_with_gradient(outputs, inputs):
    return LossOutput(good(outputs, inputs).sum, {"entropy": outputs.entropy_N.sum()})


def metric_per_token(outputs, inputs):
    return LossOutput(good(outputs, inputs).sum, {"entropy": outputs.entropy_N.detach()})


def metric_now_and_then(outputs, inputs):
    total, metrics = good(outputs, inputs)
    return LossOutput(total, {**metrics, "long": total.detach()} if len(inputs.weights_N) > 3 else metrics)


def overflowing(outputs, inputs):
    ratio = (outputs.logp_N - inputs.proximal_logp_N).exp()
    return LossOutput((inputs.weights_N * -inputs.advantages_N * ratio).sum(), {})


def overflowing_gradient(outputs, inputs):
    ratio = (outputs.logp_N - inputs.proximal_logp_N).exp()
    safe = torch.where(ratio.isinf(), 0.0, ratio)
    return LossOutput((inputs.weights_N * -inputs.advantages_N * safe).sum(), {})


def overflowing_metric(outputs, inputs):
    return LossOutput(
        good(outputs, inputs).sum, {"ratio": (outputs.logp_N - inputs.proximal_logp_N).detach().exp().sum()}
    )


def constant(outputs, inputs):
    return LossOutput((inputs.weights_N * outputs.logp_N.detach()).sum(), {})


def stillborn(outputs, inputs):
    return LossOutput((inputs.weights_N * outputs.logp_N * 0.0).sum(), {})


def vector_sum(outputs, inputs):
    return LossOutput(inputs.weights_N * outputs.logp_N, {})


def meddling(outputs, inputs):
    inputs.advantages_N.clamp_(-1, 1)
    return good(outputs, inputs)


@pytest.mark.parametrize("loss", [good, less_of_older_tokens, sft_loss, PolicyLoss(), ValueLoss()])
def test_a_loss_that_keeps_it_passes(loss):
    check_loss(loss)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (mean, "loss of two micro-batches is not the loss of both together"),
        (batch_centred, "loss of two micro-batches is not the loss of both together"),
        (same_value_other_gradient, "a token's gradient depends on the other sequences"),
        (weightless, "three times the weights do not triple it"),
        (mean_metric, "the loss's metric entropy is no sum over tokens"),
        (metric_with_gradient, "metrics must be scalars, detached"),
        (metric_per_token, "metrics must be scalars, detached"),
        (metric_now_and_then, "other metrics for other micro-batches"),
        (overflowing, "the loss's sum is not finite"),
        (overflowing_gradient, "the loss's gradient is not finite"),
        (overflowing_metric, "the loss's ratio is not finite"),
        (constant, "must be a scalar with a gradient"),
        (stillborn, "the loss has no gradient"),
        (vector_sum, "must be a scalar with a gradient"),
        (meddling, "changes its inputs in place"),
    ],
)
def test_each_way_of_breaking_it_has_its_sentence(loss, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_loss(loss)
