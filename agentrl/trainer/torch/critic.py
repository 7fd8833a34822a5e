"""The critic: a copy of the policy with one output in place of its vocabulary."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.losses import TokenOutputs
from agentrl.trainer.batch import MicroBatch
from agentrl.trainer.plan import Learning, StepSums
from agentrl.trainer.torch.forward import TorchNetwork, head_of
from agentrl.trainer.torch.learner import Learner
from agentrl.trainer.torch.sharding import ShardedRanks
from agentrl.types import TrainBatch


class Critic:
    """Learns the expected returns, with an optimizer of its own.

    network: from `critic_over`. learning: its loss is e.g. `ValueLoss()`. warmup: its steps before the first
    one of the policy (optimizer steps). ranks: see `TorchNetwork`.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        learning: Learning,
        *,
        warmup: int = 0,
        ranks: ShardedRanks | None = None,
    ) -> None:
        self.network = network
        self.learning = learning
        self.warmup = warmup
        forward = partial(value_outputs, bf16=learning.config.bf16)
        self.learner = Learner(TorchNetwork(network, ranks=ranks), forward, learning)

    def learn(self, batch: TrainBatch) -> StepSums:
        """One optimizer step; see `Learner.learn`."""
        return self.learner.learn(batch)


def critic_over(model: PreTrainedModel) -> PreTrainedModel:
    """A critic with the policy's trunk, and a head that predicts 0 everywhere.

    It shares no memory with `model`.
    """
    critic = deepcopy(model)
    # Tied, the head would be the embedding of the vocabulary.
    critic.config.get_text_config().tie_word_embeddings = False
    like = head_of(model).weight
    assert isinstance(like, Tensor)
    head = nn.Linear(like.shape[1], 1, bias=False, dtype=like.dtype, device=like.device)
    nn.init.zeros_(head.weight)
    critic.set_output_embeddings(head)
    return critic


def value_outputs(critic: TorchNetwork, row: MicroBatch, *, bf16: bool) -> TokenOutputs:
    """The return expected before each of the row's N predicted tokens; logprobs and entropies are 0.

    Call it in `critic.attending()`.
    """
    return critic.computed(lambda: _outputs(critic, row, bf16=bf16))


def _outputs(critic: TorchNetwork, row: MicroBatch, *, bf16: bool) -> TokenOutputs:
    with torch.autocast(critic.model.device.type, torch.bfloat16, enabled=bf16):
        values_N1: Tensor = head_of(critic.model)(critic.predicting_states(row))
    values_N = values_N1[:, 0].to(torch.promote_types(values_N1.dtype, torch.float32))
    zeros_N = torch.zeros_like(values_N)
    return TokenOutputs(zeros_N, zeros_N, values_N)
