"""The process groups of a layout, and this process's place in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import Store

from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.device import emulate_cuda


@contextmanager
def joined(
    layout: MegatronConfig, rank: int, *, store: Store, local_rank: int, timeout_s: float = 600.0
) -> Iterator[None]:
    """Join the process groups as rank `rank` of the layout, for the block.

    A block that raises leaves the groups as they are. NCCL's shutdown waits for the other ranks, which may be
    in a collective that waits for this one: the failed rank could not report its error, and they would be
    blamed.

    store: of the rendezvous. local_rank: the number among the ranks of its machine.
    timeout_s: for one collective; a rank that waits longer for another one fails.
    """
    on_the_cpu = emulate_cuda()
    dist.init_process_group(
        "gloo" if on_the_cpu else "nccl",
        store=store,
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    if not on_the_cpu:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    virtual = layout.num_virtual_stages_per_pipeline_rank
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=None if virtual == 1 else virtual,
        context_parallel_size=layout.context_parallel_size,
        create_gloo_process_groups=False,
    )
    if not on_the_cpu:
        model_parallel_cuda_manual_seed(0)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
