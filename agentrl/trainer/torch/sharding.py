"""Networks that several ranks share, by torch's fully sharded data parallelism (FSDP2).

A rank has a shard of every weight, of its gradient and of its optimizer's state (arXiv:2304.11277). A layer's
weights are gathered before it computes, and freed afterwards; gradients are summed over all ranks, never
averaged. All methods here are collectives: every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.trainer.batch import EMPTY_ROW, MicroBatch, micro_batches, shares_of
from agentrl.trainer.launch.process_group import opened_store, process_group
from agentrl.trainer.launch.rank_plan import RankPlace
from agentrl.trainer.offload import CpuAdamW, CpuShard
from agentrl.types import BoolArray, Sample


class Whole(nn.Module):
    """A network, and what is called while the weights outside of its layers are gathered."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], object]) -> object:
        """Call a function of the network."""
        return function()

    def free(self) -> None:
        """Free what was gathered and kept for a backward pass, where none follows."""
        assert isinstance(self, FSDPModule), "it is sharded"
        self.reshard()


class ShardedRanks:
    """This rank, and those that it shares networks with; they are in a process group.

    shard_size: ranks that share one replica of each network (count). A shard is some rows of a weight.
    device: a rank's own.
    """

    def __init__(self, shard_size: int, device: torch.device) -> None:
        sizes = (dist.get_world_size() // shard_size, shard_size)
        self._mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
        self._wholes: dict[PreTrainedModel, Whole] = {}

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which has what is gathered for the driver and for files."""
        return dist.get_rank() == 0

    def shard(self, model: PreTrainedModel) -> Whole:
        """Keep this rank's shard of a network, in place; it is to be called in what this returns.

        A network that is sharded already stays as it is.
        """
        if model not in self._wholes:
            for layer in layers_of(model):
                fully_shard(layer, mesh=self._mesh)
            whole = Whole(model)
            fully_shard(whole, mesh=self._mesh)
            for module in whole.modules():
                if isinstance(module, FSDPModule):
                    # By default the sum is divided by the number of ranks.
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            self._wholes[model] = whole
        return self._wholes[model]

    def rows(
        self,
        samples: Sequence[Sample],
        masks: Sequence[BoolArray],
        max_tokens: int,
        *,
        width: int,
        cut: Callable[[tuple[int, ...]], Sequence[int]] | None,
    ) -> Sequence[MicroBatch]:
        """This rank's rows, see `micro_batches`; all ranks have equally many, of about as many tokens.

        width: of the network's states.
        """
        own_masks = shares_of(masks, dist.get_world_size(), width)[dist.get_rank()]
        rows = micro_batches(samples, own_masks, max_tokens, cut)
        most = self._number(len(rows), dist.ReduceOp.MAX)
        return [*rows, *[EMPTY_ROW] * (most - len(rows))]

    def first_has(self, is_there: bool) -> bool:
        """Whether rank 0 has something; what the others say does not count."""
        return bool(self._number(is_there and self.is_first, dist.ReduceOp.SUM))

    def _number(self, value: int, operation: dist.ReduceOp.RedOpType) -> int:
        number = torch.tensor(int(value), device=self._mesh.device_type)
        dist.all_reduce(number, operation)
        return int(number)


def layers_of(model: nn.Module) -> Iterator[GradientCheckpointingLayer]:
    """The transformer layers of any network."""
    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def only_gathered(tensor: Tensor | CpuShard) -> Tensor:
    """Take part where rank 0 copies a whole tensor; nothing of it stays here."""
    if isinstance(tensor, CpuShard):
        tensor.whole()
    elif isinstance(tensor, DTensor):
        tensor.full_tensor()
    return torch.empty(0)


def shard_like(whole: Tensor, own: object) -> Tensor:
    """A copy of this rank's part of a whole tensor, where `own` is such a part; no rank sends anything.

    Raises:
        ValueError: the tensor has another shape.
    """
    if not isinstance(own, DTensor):
        return whole
    part = rows_like(whole, own).to(own.device, copy=True)
    return DTensor.from_local(
        part, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def rows_like(whole: Tensor, own: Tensor) -> Tensor:
    """This rank's part of a whole tensor, where `own` is such a part; where it is.

    Raises:
        ValueError: the tensor has another shape.
    """
    if whole.shape != own.shape:
        raise ValueError(f"a tensor is {tuple(whole.shape)}, and {tuple(own.shape)} here")
    if not isinstance(own, DTensor):
        return whole
    mesh, (number,) = own.device_mesh, (n for n, p in enumerate(own.placements) if p.is_shard())
    rows = -(-len(whole) // mesh.size(number))
    first = rows * mesh.get_local_rank(number)
    return whole[first : first + rows]


def load_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Fill what learns of a network, and its buffers, with whole tensors, of which a rank takes its parts.

    Raises:
        RuntimeError, ValueError: they are of another network.
    """
    own, frozen = model.state_dict(), frozen_names(model)
    parts = {name: shard_like(tensor, own.get(name)) for name, tensor in weights.items()}
    others = model.load_state_dict(parts, strict=False)
    if strange := [*others.unexpected_keys, *(name for name in others.missing_keys if name not in frozen)]:
        raise RuntimeError(f"{strange[0]} is only in one of the state and {type(model).__name__}")


def frozen_names(model: nn.Module) -> set[str]:
    """The parameters that do not learn, by all their names."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def optimizer_shards(saved: Mapping[str, object], optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The state of an optimizer with this rank's parts of its tensors, which are whole.

    Raises:
        KeyError, ValueError: it is of another optimizer.
    """
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    states = saved["state"]
    if not isinstance(states, dict):
        raise ValueError("an optimizer has no tensors")
    cut = rows_like if isinstance(optimizer, CpuAdamW) else shard_like
    shards = {
        # Steps have no dimension, and no parts.
        number: {name: cut(t, parameters[number]) if t.ndim else t for name, t in state.items()}
        for number, state in states.items()
    }
    return {**saved, "state": shards}


@torch.no_grad()
def step_sharded(optimizer: torch.optim.Muon) -> None:
    """A step of Muon over matrices that ranks share: each is gathered for its update, one at a time.

    The means stay sharded. Every rank orthogonalizes every matrix, as one process does.
    """
    for group in optimizer.param_groups:
        for matrix in (matrix for matrix in group["params"] if matrix.grad is not None):
            state = optimizer.state[matrix]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(matrix.grad)
            mean = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
            update = matrix.grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
            whole = nn.Parameter(matrix.full_tensor())
            whole.grad = update.full_tensor()
            inner = torch.optim.Muon([whole])
            inner.param_groups[0].update({**group, "params": [whole], "momentum": 0.0, "nesterov": False})
            inner.step()
            matrix.copy_(shard_like(whole.detach(), matrix))


@contextmanager
def sharing(
    place: RankPlace, world_size: int, shard_size: int, device: torch.device
) -> Iterator[ShardedRanks | None]:
    """Be one of the ranks for the block; None = it is the only one.

    shard_size: ranks that share one replica of a network (count).
    """
    if world_size == 1:
        yield None
        return
    assert place.rendezvous is not None, "several ranks are processes of their own"
    store = opened_store(place.rendezvous)
    group = process_group(
        *(place.rank, world_size), store=store, local_rank=place.local_rank, on_gpus=device.type == "cuda"
    )
    with group:
        yield ShardedRanks(shard_size, device)
