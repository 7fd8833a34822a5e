import pytest
import torch

from agentrl.losses import LossInputs, TokenOutputs, sft_loss


def test_it_is_the_weighted_negative_log_likelihood():
    logp = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    weights = torch.tensor([0.5, 0.25, 0.0])
    unused = torch.tensor([7.0, 8.0, 9.0])
    output = sft_loss(
        TokenOutputs(logp, torch.tensor([1.0, 2.0, 3.0])),
        LossInputs(unused, unused, unused, weights, torch.zeros(3, dtype=torch.int64)),
    )
    output.sum.backward()
    assert float(output.sum.detach()) == pytest.approx(1.0)
    assert logp.grad.tolist() == [-0.5, -0.25, 0.0]
    assert float(output.metrics["entropy_loss"]) == 6.0
