"""The process groups of a layout, and this process's place in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import Store

from agentrl.trainer.launch.process_group import process_group
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.device import emulate_cuda


@contextmanager
def joined(
    layout: MegatronConfig, rank: int, *, store: Store, local_rank: int, timeout_s: float = 600.0
) -> Iterator[None]:
    """Join the process groups as rank `rank` of the layout, for the block; see `process_group`."""
    on_gpus = not emulate_cuda()
    group = process_group(
        rank, layout.world_size, store=store, local_rank=local_rank, on_gpus=on_gpus, timeout_s=timeout_s
    )
    with group, _model_parallel(layout, on_gpus=on_gpus):
        yield


@contextmanager
def _model_parallel(layout: MegatronConfig, *, on_gpus: bool) -> Iterator[None]:
    virtual = layout.num_virtual_stages_per_pipeline_rank
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=None if virtual == 1 else virtual,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_ranks,
        create_gloo_process_groups=False,
    )
    if on_gpus:
        model_parallel_cuda_manual_seed(0)
    yield
    parallel_state.destroy_model_parallel()
