"""One process among others: it finds them, and its place in the layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.device import pretend


@contextmanager
def joined(layout: MegatronConfig, rank: int, *, meeting: str, timeout_s: float = 600.0) -> Iterator[None]:
    """Be rank `rank` of the layout while the block runs.

    meeting: where all ranks meet, as torch.distributed says it: "tcp://127.0.0.1:29500", "file:///tmp/x".
    timeout_s: for one collective; a rank that waits longer for another one fails.
    """
    on_the_cpu = pretend()
    dist.init_process_group(
        "gloo" if on_the_cpu else "nccl",
        init_method=meeting,
        rank=rank,
        world_size=layout.actor_num_gpus_per_node,
        timeout=timedelta(seconds=timeout_s),
    )
    if not on_the_cpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
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
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
