"""The torch trainer takes what another one has saved: the steps after it are those that had come anyway."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from agentrl.losses import PolicyLoss
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch.forward import TorchNetwork, token_outputs
from agentrl.trainer.torch.learner import Learner
from tests.trainer.tiny import batch, qwen3, settings


class Saved:
    """A learner's network and means by name, as `saved_elsewhere` gives them."""

    def __init__(self, learner):
        state = learner.state()
        self._network = {name: tensor.clone() for name, tensor in state["network"].items()}
        self._means = {
            name: {kind: tensor.clone() for kind, tensor in optimizer["state"][number].items()}
            for names, optimizer in zip(state["parameters"], state["optimizers"], strict=True)
            for number, name in enumerate(names)
        }

    def value(self, name):
        return self._network[name]

    def moment(self, name, kind):
        return self._means[name][kind]


def learner(**changes):
    config = settings(lr=1e-2, adam_beta1=0.8, adam_beta2=0.9, **changes)
    forward = partial(token_outputs, bf16=False)
    return Learner(TorchNetwork(qwen3(torch.float32)), forward, Learning(PolicyLoss(), config, 10))


@pytest.mark.parametrize("changes", [{}, {"optimizer_cpu_offload": True}, {"optimizer": "muon"}])
def test_the_steps_after_it_are_those_of_who_saved_it(changes):
    first, second = learner(**changes), learner(**changes)
    for number in range(2):
        first.learn(batch(number))
    second.take(Saved(first), first.done)
    for number in (2, 3):
        for each in (first, second):
            each.learn(batch(number))
        pairs = zip(first.network.model.parameters(), second.network.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
