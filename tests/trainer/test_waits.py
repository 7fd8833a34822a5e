"""Between two kernels of a pass nothing waits for the card: no value is read, in no layer and for no row."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from agentrl.losses import OutputHead, PolicyLoss, Targets, logprobs_and_entropy
from agentrl.trainer.loss_inputs import StepInputs
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import shape_of
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch.forward import TorchNetwork, token_outputs
from agentrl.trainer.torch.learner import Learner
from tests.trainer.families import family
from tests.trainer.megatron.equality import share_of
from tests.trainer.megatron.models import CONFIGS, checkpoint_of
from tests.trainer.megatron.test_losses import LOSSES, batch
from tests.trainer.megatron.together import Ranks
from tests.trainer.tiny import batch as tiny_batch
from tests.trainer.tiny import settings
from tests.trainer.waits import Waits

LAYERS = (1, 3)
LAYOUTS = {
    1: ({}, {"recompute_granularity": "full"}),
    2: (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
        {},
    ),
}


def model_with(kind: str, layers: int):
    given = CONFIGS[kind]()
    config = type(given)(**{**given.to_dict(), "num_hidden_layers": layers, "layer_types": None})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def waits_of_megatron(layout: MegatronConfig, _rank: int, kind: str, layers: int, loss: str):
    """Runs in a rank: where a forward pass waits, and where forward and backward pass of a step do."""
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    model, train_batch = model_with(kind, layers), batch("token mean")
    network = Network(shape_of(model.config), layout, bf16=False)
    network.load(checkpoint_of(model).__getitem__)
    outputs = partial(logprobs_of, entropy_gradient=loss == "ppo")
    learner = MegatronLearner(network, outputs, Learning(LOSSES[loss], settings(), 10))
    rows = share_of(layout, train_batch.samples)
    with Waits() as scoring:
        learner.passes.forward(rows)
    inputs = StepInputs(train_batch)
    with Waits() as learning:
        learner.passes.learn(rows, lambda row, out: learner._loss(out, inputs.of(row, out)))
    return scoring, learning


@pytest.mark.parametrize("count", [1, 2])
def test_no_pass_of_megatron_waits_for_the_card(count):
    dense = [("qwen3", "grpo", 1), ("qwen3", "grpo", 3), ("glm4", "ppo", 2), ("qwen3_5_text", "grpo", 1)]
    # Ranks that share experts have to know how many tokens come.
    kinds = {1: [*dense, ("deepseek_v3", "grpo", 2)], 2: dense}
    with Ranks(count) as ranks:
        for sizes in LAYOUTS[count]:
            config = MegatronConfig(actor_num_gpus_per_node=count, **sizes)
            for kind, loss, layers in kinds[count]:
                for scoring, learning in ranks.run(waits_of_megatron, config, kind, layers, loss):
                    assert not scoring, (sizes, kind, layers)
                    assert not learning, (sizes, kind, layers)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_waits_for_the_card(loss):
    waits = waits_of_torch(1, loss)
    assert not waits


def waits_of_torch(layers: int, loss: str):
    train_batch = batch("token mean")
    forward = partial(token_outputs, bf16=False, entropy_gradient=loss == "ppo")
    learner = Learner(
        TorchNetwork(model_with("qwen3", layers)), forward, Learning(LOSSES[loss], settings(), 10)
    )
    inputs = StepInputs(train_batch)
    with Waits() as places:
        learner._backward(train_batch, inputs)
    # The sums of the step, once.
    return places - Counter({"tolist at agentrl.trainer.torch.learner:_backward": 1})


def test_no_pass_of_the_torch_trainer_waits_for_the_card():
    for layers in LAYERS:
        assert not waits_of_torch(layers, "grpo")


@pytest.mark.parametrize("name", ["gemma2_caps", "mistral_window", "deepseek_v3", "lfm2", "qwen3_5", "qwen3_next"])
def test_no_layer_waits_for_the_card_in_batches_of_like_length(name):
    train_batch = tiny_batch()
    forward = partial(token_outputs, bf16=False)
    learner = Learner(TorchNetwork(family(name)), forward, Learning(PolicyLoss(), settings(), 10))
    inputs = StepInputs(train_batch)
    with Waits() as places:
        learner._backward(train_batch, inputs)
    assert places == Counter({"tolist at agentrl.trainer.torch.learner:_backward": 1})


def test_a_wait_is_noticed():
    x = torch.arange(4.0)
    for act in (
        x.sum().item,
        x.tolist,
        lambda: bool(x.sum() > 1),
        lambda: x[x > 1],
        x.nonzero,
        lambda: x.to(torch.int64).cpu(),
    ):
        with Waits() as places:
            act()
        assert sum(places.values()) >= 1, act

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    y = Reads.apply(nn.Parameter(x)).sum()
    with Waits() as places:
        y.backward()
    assert any("_local_scalar_dense" in place for place in places)
    targets = Targets(torch.zeros(4, dtype=torch.int64), torch.ones(4))
    with Waits() as places:
        logprobs_and_entropy(torch.randn(4, 2, requires_grad=True), OutputHead(torch.randn(3, 2)), targets)
    assert not places
