"""Real ranks of the torch trainer, and what each does with its part of a batch."""

from __future__ import annotations

import os
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from agentrl.losses import PolicyLoss, ValueLoss
from agentrl.trainer.launch.process_group import process_group
from agentrl.trainer.plan import Learning
from agentrl.trainer.torch.adapters import adapt
from agentrl.trainer.torch.critic import Critic, critic_over
from agentrl.trainer.torch.learner import whole
from agentrl.trainer.torch.sharding import ShardedRanks
from agentrl.trainer.torch.worker import AuxiliaryModels, TorchWorker
from tests.trainer.families import family
from tests.trainer.tiny import settings

CPU = torch.device("cpu")


@contextmanager
def ranks_of(store, rank, count, shard_size):
    """This process as one of several ranks; None where it is the only one."""
    if count == 1:
        yield None
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with process_group(rank, count, store=store, local_rank=rank, on_gpus=False, timeout_s=60):
        yield ShardedRanks(shard_size, CPU)


def model_of(kind, dtype=torch.float32):
    """A model of a family, with weights that no layer can do without."""
    return family(kind).to(dtype)


def worker_of(model, ranks, *, loss=None, has_critic=False, ref=None, moves=False, **changes):
    """A rank's worker."""
    config = settings(**changes)
    adapt(model, config)
    critic = None
    if has_critic:
        critic = Critic(critic_over(model), Learning(ValueLoss(), config, 6), warmup=0, ranks=ranks)
    auxiliary = AuxiliaryModels(critic, ref, None, moves)
    return TorchWorker(model, Learning(loss or PolicyLoss(), config, 6), auxiliary, ranks)


@contextmanager
def gathered_gradients(*models):
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


def updated(store, rank, layout, kind, batch, options):
    """Gradients, sums, steps and weights of one update in a rank. layout: ranks, and those of a replica."""
    with ranks_of(store, rank, *layout) as ranks:
        model = model_of(kind)
        worker = worker_of(model, ranks, **options)
        networks = [learner.network.model for learner in worker._learners().values()]
        with gathered_gradients(*networks) as gradients:
            done = worker.update(batch)
        weights = dict(worker._published(model))
        sums = {role: (dict(each.sums), dict(each.step)) for role, each in done.items()}
        return dict(gradients), sums, weights, len(batch.samples)
