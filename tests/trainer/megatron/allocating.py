"""What a rank allocates for a network that learns, and what it keeps for its backward pass."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedConfig

from agentrl.losses import PolicyLoss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model.shape import learning_of, shape_of
from agentrl.trainer.plan import Learning
from tests.trainer.megatron.equality import share_of
from tests.trainer.megatron.models import checkpoint_of, model_of
from tests.trainer.tiny import batch, settings


def allocated(layout: MegatronConfig, _rank: int, kind: str, config: TrainerConfig) -> tuple[int, int, int]:
    """Runs in a rank: bytes of weights, gradients and optimizer after one step."""
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    model = model_of(kind)
    network = Network(shape_of(model.config), layout, bf16=config.bf16)
    network.load(checkpoint_of(model).__getitem__)
    network.freeze(learning_of(network.shape, config))
    learner = MegatronLearner(network, logprobs_of, Learning(PolicyLoss(), config, 10))
    train_batch = batch()
    learner.learn(share_of(layout, train_batch.samples), train_batch)
    parts = list(learner.optimizer.parts())
    optimizer = sum(mean.nbytes for part in parts for mean in part.moments.values())
    optimizer += sum(part.main.nbytes for part in parts if part.is_copy)
    return storages(learner.passes.tensors()), storages(learner.passes.gradients()), optimizer


class Row(NamedTuple):
    """Bytes: kept, by autograd, besides parameters; peak, the most at once beside what was there before."""

    kept: int
    peak: int


def row(layout: MegatronConfig, _rank: int, config: PreTrainedConfig, bf16: bool, tokens: int) -> Row:
    """Runs in a rank: what one row of so many tokens takes in a pass forwards and backwards."""
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network = Network(shape_of(model.config), layout, bf16=bf16)
    network.load(checkpoint_of(model).__getitem__)
    learning = Learning(PolicyLoss(), settings(bf16=bf16, max_tokens_per_gpu=tokens), 10)
    learner = MegatronLearner(network, logprobs_of, learning)
    train_batch = batch(masks=[[0] + [1] * (tokens - 1)] * layout.data_parallel_size)
    sizes: dict[int, int] = {}
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    share = share_of(layout, train_batch.samples)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        learner.learn(share, train_batch)
    for parameter in learner.passes.tensors():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    tensors.clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        learner.learn(share, train_batch)
    return Row(sum(sizes.values()), _peak(profiler))


def _peak(profiler: profile) -> int:
    """The most memory that torch's allocator has given out at once beside what was there (bytes)."""
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = sorted((each for each in events if each["name"] == "[memory]"), key=lambda each: each["ts"])
    return max(accumulate(each["args"]["Bytes"] for each in changes))


def storages(tensors) -> int:
    """Bytes of the memory that tensors view, each piece once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
