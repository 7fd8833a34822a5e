"""The plan of Megatron's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from agentrl.processes.interfaces import is_loopback
from agentrl.trainer.launch.phases import report_phase
from agentrl.trainer.launch.rank_plan import RankPlace
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.plan import Plan, Worker

WORKER = "agentrl.trainer.megatron.worker"
"""The module that Megatron's ranks import first."""
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "context_parallel_size",
    "data_parallel_size",
    "shares_the_optimizer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPlan(Plan):
    """A model that is sharded over the ranks of `layout`."""

    layout: MegatronConfig

    @property
    def world_size(self) -> int:
        """Ranks (count)."""
        return self.layout.world_size

    @property
    def publishes_bf16(self) -> bool:
        """Parameters are bfloat16 where the trainer computes in it."""
        return self.config.bf16

    @property
    def layout_facts(self) -> Mapping[str, int]:
        """The settings that the files of a saved state depend on."""
        return {name: int(getattr(self.layout, name)) for name in _LAYOUT}

    @contextmanager
    def worker(self, place: RankPlace) -> Iterator[Worker]:
        """The worker of one rank, in its process groups."""
        import torch

        from agentrl.trainer.megatron.parallel import joined
        from agentrl.trainer.megatron.worker import MegatronWorker

        assert place.rendezvous is not None, "Megatron's ranks are processes of their own"
        if not torch.cuda.is_available():
            torch.set_num_threads(1)
        # Rows differ in length: without it the allocator keeps pieces of every size.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        if is_loopback(place.rendezvous.host):
            # Otherwise gloo binds to the address of the machine's name, and NCCL to any but the loopback.
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        store = place.rendezvous.store()
        report_phase("joining the other ranks")
        with joined(self.layout, place.rank, store=store, local_rank=place.local_rank):
            yield MegatronWorker(self)
