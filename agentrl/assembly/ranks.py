"""This process's rank where a launcher such as torchrun starts the command for every rank; loads no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentrl.assembly.config import RunConfig
from agentrl.cluster.ray.session import checked
from agentrl.errors import ConfigError
from agentrl.trainer.launch.launcher_env import LauncherEnv, launcher_env

if TYPE_CHECKING:
    from agentrl.trainer.launch.launched import LaunchedRanks


def launcher_env_of(config: RunConfig) -> LauncherEnv | None:
    """This process's rank; None where no launcher started any, or the trainer has no ranks.

    Raises:
        ConfigError: the environment is incomplete, or contradicts the layout; or cluster = ray.
    """
    if config.trainer.trainer != "megatron" or config.rollout.debug_rollout_only:
        return None
    if config.cluster.cluster == "ray":
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                "cluster = ray starts all ranks itself, and WORLD_SIZE is in the environment; start this "
                "command once, without a launcher, or leave cluster = ray out."
            )
        return None
    return launcher_env(config.megatron, os.environ)


def served_as_rank(config: RunConfig) -> bool:
    """Run as a launcher's rank other than 0 until the run has ended; False where this process is the run.

    Raises:
        ConfigError: there is no rank 0; the environment is incomplete, or contradicts the layout.
    """
    env = launcher_env_of(config)
    if env is None or not env.rank:
        return False
    run_launched_rank(env)
    return True


def run_launched_rank(env: LauncherEnv) -> None:
    """Run as a rank other than 0 until the run has ended.

    Raises:
        ConfigError: there is no rank 0.
    """
    from agentrl.trainer.launch.launched import serve_launched
    from agentrl.trainer.megatron.plan import WORKER

    serve_launched(env, WORKER)


@contextmanager
def launched_ranks(config: RunConfig) -> Iterator[LaunchedRanks | None]:
    """The other ranks that a launcher started; None where this process starts all of them itself.

    Raises:
        UserError: this process is a rank, not the run; or the others did not connect.
        TrainerError: a rank disconnected before all were connected.
    """
    if config.cluster.cluster == "ray":
        # Before a folder is made for the run.
        checked(config.cluster, os.environ)
    env = launcher_env_of(config)
    if env is None:
        yield None
        return
    if env.rank:
        raise ConfigError(
            f"this process is rank {env.rank} of a run; start it as `agentrl {config.command}`."
        )
    from agentrl.trainer.launch.launched import connected_ranks

    # A child process, such as an inference server, hosts stores of its own.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with connected_ranks(env) as launched:
        yield launched
