"""Which GPUs of a run are used by a rank of its trainer and by a server, too."""

from __future__ import annotations

from collections.abc import Collection

from agentrl.assembly.cluster import local_places
from agentrl.assembly.config import RunConfig


def shared_gpus(config: RunConfig) -> Collection[str]:
    """The GPUs of this machine that a rank and a server share, as CUDA_VISIBLE_DEVICES names them.

    On Ray each has GPUs of its own, unless they take turns, and then the ranks start in a turn of theirs.

    Raises:
        ConfigError: there are too few GPUs for the run.
    """
    return () if config.cluster.cluster != "local" else local_places(config).gpus.shared
