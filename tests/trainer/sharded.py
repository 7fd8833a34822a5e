"""Real ranks of the torch trainer, and what each does with its part of a batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from agentrl.losses import PolicyLoss, ValueLoss
from agentrl.trainer.launch.process_group import process_group
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch.critic import Critic, critic_over
from agentrl.trainer.torch.frozen import freeze
from agentrl.trainer.torch.learner import whole
from agentrl.trainer.torch.sharding import ShardedRanks
from agentrl.trainer.torch.worker import AuxiliaryModels, TorchWorker
from tests.trainer.families import family
from tests.trainer.tiny import settings

NONE: Mapping[str, object] = {}


class Ranks(NamedTuple):
    """Ranks in all, and those of a replica."""

    count: int
    shard_size: int


class Kind(NamedTuple):
    """A network, and how it learns. changes: of the trainer's settings."""

    family: str
    dtype: torch.dtype = torch.float32
    has_critic: bool = False
    changes: Mapping[str, object] = NONE

    def model(self):
        """The network, with weights that no layer can do without."""
        model = family(self.family).to(self.dtype)
        freeze(model, settings(**self.changes))
        return model

    def worker(self, model, ranks):
        """A rank's worker of it."""
        config = settings(**{"max_tokens_per_gpu": 20, **self.changes})
        critic = None
        if self.has_critic:
            critic = Critic(critic_over(model), Learning(ValueLoss(), config, 6), ranks=ranks)
        policy = Learning(PolicyLoss(), config, 6)
        return TorchWorker(model, policy, AuxiliaryModels(critic), ranks)


class Updated(NamedTuple):
    """What a rank has of one update. gradients: whole, by the learner's number and the weight's name.

    sums, steps: of each role. weights: as they are published, whole. scores: of the rank's samples.
    """

    gradients: dict
    sums: dict
    steps: dict
    weights: dict
    scores: dict


@contextmanager
def ranks_of(store, rank, ranks):
    """This process as one of several ranks; None where it is the only one."""
    if ranks.count == 1:
        yield None
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with process_group(rank, ranks.count, store=store, local_rank=rank, on_gpus=False, timeout_s=60):
        yield ShardedRanks(ranks.shard_size, torch.device("cpu"))


@contextmanager
def gathered_gradients(models):
    """What the optimizers are given for each weight of several networks, whole, by number and name."""
    names = {id(p): (n, name) for n, model in enumerate(models) for name, p in model.named_parameters()}
    found = {}

    def note(optimizer, *_):
        for group in optimizer.param_groups:
            # Muon steps on a matrix that it has gathered.
            for p in (p for p in group["params"] if id(p) in names):
                found[names[id(p)]] = whole(p.grad).clone()

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def updated(store, rank, ranks, kind, batch):
    """One update in a rank, of networks whose memory is away until it begins, and scores after it."""
    with ranks_of(store, rank, ranks) as shared:
        model = kind.model()
        worker = kind.worker(model, shared)
        networks = [learner.network.model for learner in worker._learners().values()]
        for memory in set(worker._memory.values()):
            memory.offload()
        with gathered_gradients(networks) as gradients:
            done = worker.update(batch)
        for memory in set(worker._memory.values()):
            memory.onload()
        return Updated(
            dict(gradients),
            {role: dict(each.sums) for role, each in done.items()},
            {role: dict(each.step) for role, each in done.items()},
            {name: tensor.clone() for name, tensor in worker._published(model)},
            worker.score(batch.samples, "old").values,
        )


def held(store, rank, ranks, kind, batch):
    """What a rank has of weights, of gradients and of optimizers once it has updated (bytes)."""
    with ranks_of(store, rank, ranks) as shared:
        worker = kind.worker(kind.model(), shared)
        learners = worker._learners().values()
        weights = [p for learner in learners for p in learner.network.model.parameters()]
        gradients = []

        def note(*_):
            gradients[:] = gradients or [p.grad for p in weights]

        handle = register_optimizer_step_pre_hook(note)
        worker.update(batch)
        handle.remove()
        states = [tensor for learner in learners for tensor in learner.optimizer_tensors()]
        return tuple(sum(map(nbytes, each)) for each in (weights, gradients, states))


def nbytes(tensor):
    """The bytes of this rank's part."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes
