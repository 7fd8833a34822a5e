"""Which GPUs of a run are used by a rank of its trainer and by a server, too."""

from __future__ import annotations

from agentrl.assembly.cluster import num_ranks
from agentrl.assembly.config import RunConfig
from agentrl.gpus import num_gpus


def shared_gpus(config: RunConfig) -> range:
    """The GPUs of this machine that a rank and a server share, by their index among those of this process.

    Both count from the first one. The torch trainer computes on the CPU. On Ray each has GPUs of its own,
    unless they take turns, and then the ranks start in a turn of theirs.
    """
    is_here = config.cluster.cluster == "local" and config.trainer.trainer == "megatron"
    starts_servers = config.engine.engine == "sglang" and config.engine.sglang_url is None
    if not (is_here and starts_servers) or config.rollout.replay is not None:
        return range(0)
    return range(min(num_ranks(config), config.engine.num_gpus, num_gpus()))
