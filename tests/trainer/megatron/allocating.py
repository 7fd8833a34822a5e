"""What a rank allocates for a network that learns."""

from __future__ import annotations

from agentrl.losses import PolicyLoss
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import shape_of
from agentrl.trainer.plan import Learning
from tests.trainer.megatron.equality import share_of
from tests.trainer.megatron.models import model_of
from tests.trainer.tiny import batch, settings


def allocated(layout: MegatronConfig, _rank: int, kind: str, bf16: bool) -> tuple[int, int, int]:
    """Runs in a rank: bytes of weights, gradients and optimizer after one step."""
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    model = model_of(kind)
    network = Network(shape_of(model.config), layout, bf16=bf16)
    network.load(model.state_dict().__getitem__)
    learner = MegatronLearner(network, logprobs_of, Learning(PolicyLoss(), settings(bf16=bf16), 10))
    train_batch = batch()
    learner.learn(share_of(layout, train_batch.samples), train_batch)
    parts = list(learner.optimizer.parts())
    optimizer = sum(mean.nbytes for part in parts for mean in part.moments.values())
    optimizer += sum(part.main.nbytes for part in parts if part.is_copy)
    return storages(learner.passes.tensors()), storages(learner.passes.gradients()), optimizer


def storages(tensors) -> int:
    """Bytes of the memory that tensors view, each piece once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
