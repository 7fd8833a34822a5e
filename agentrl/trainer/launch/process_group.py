"""The process group of a trainer's ranks, by which they compute together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from agentrl.processes.interfaces import is_loopback
from agentrl.trainer.launch.phases import report_phase
from agentrl.trainer.launch.rendezvous import Rendezvous


def opened_store(rendezvous: Rendezvous) -> Store:
    """The store of the ranks, which then communicate on the loopback interface where all are on one machine.

    Raises:
        ConfigError: no store is there.
    """
    if is_loopback(rendezvous.host):
        # Otherwise gloo binds to the address of the machine's name, and NCCL to any but the loopback.
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    store = rendezvous.store()
    report_phase("joining the other ranks")
    return store


@contextmanager
def process_group(
    rank: int, world_size: int, *, store: Store, local_rank: int, on_gpus: bool, timeout_s: float = 600.0
) -> Iterator[None]:
    """Be rank `rank` of `world_size` for the block: with NCCL on a GPU of its own, or with gloo on the CPU.

    A block that raises leaves the groups as they are. NCCL's shutdown waits for the other ranks, which may be
    in a collective that waits for this one: the failed rank could not report its error, and they would be
    blamed.

    store: of the rendezvous. local_rank: the number among the ranks of its machine.
    timeout_s: for one collective; a rank that waits longer for another one fails.
    """
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    if on_gpus:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    yield
    dist.destroy_process_group()
