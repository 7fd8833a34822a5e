"""The environment variables that a launcher such as torchrun sets for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import NamedTuple

from agentrl.errors import ConfigError
from agentrl.trainer.megatron.config import MegatronConfig

_LAST_PORT = 65535


class LauncherEnv(NamedTuple):
    """Rank `rank` of `world_size`.

    local_rank: its number among the ranks of its machine. host, port: the address of the rendezvous store.
    has_agent_store: the launcher hosts that store; otherwise rank 0 does. restart_count: how often the
    launcher has restarted all ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    has_agent_store: bool
    restart_count: int


def launcher_env(layout: MegatronConfig, environment: Mapping[str, str]) -> LauncherEnv | None:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; None = no launcher started ranks.

    Raises:
        ConfigError: they are incomplete, or contradict the layout.
    """
    count = _number(environment, "WORLD_SIZE", "1")
    if count < 2:
        if layout.actor_num_nodes > 1:
            raise ConfigError(
                f"actor_num_nodes = {layout.actor_num_nodes} needs cluster = ray, or a launcher that starts "
                "this command for every rank, such as torchrun (docs/megatron.md, `Several machines`)."
            )
        return None
    if count != layout.world_size:
        raise ConfigError(
            f"WORLD_SIZE = {count} is not actor_num_nodes x actor_num_gpus_per_node = "
            f"{layout.actor_num_nodes} x {layout.actor_num_gpus_per_node}; start as many "
            "processes, or change these."
        )
    number = _number(environment, "RANK")
    if number >= count:
        raise ConfigError(f"RANK = {number} must be less than WORLD_SIZE = {count}; number the ranks from 0.")
    if not environment.get("MASTER_ADDR"):
        raise ConfigError(_missing("MASTER_ADDR"))
    port = _number(environment, "MASTER_PORT")
    if not 0 < port <= _LAST_PORT:
        raise ConfigError(f"MASTER_PORT = {port} is no port; choose one from 1 to {_LAST_PORT}.")
    return LauncherEnv(
        number,
        count,
        _number(environment, "LOCAL_RANK", str(number % layout.actor_num_gpus_per_node)),
        environment["MASTER_ADDR"],
        port,
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        _number(environment, "TORCHELASTIC_RESTART_COUNT", "0"),
    )


def is_loopback(host: str) -> bool:
    """Whether a name is a loopback address on every machine.

    A machine's own name is not, though that machine may resolve it to a loopback address.
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment.get(name, default)
    if text is None:
        raise ConfigError(_missing(name))
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r} in the environment must be a whole number; set it to one.")
    return int(text)


def _missing(name: str) -> str:
    return (
        f"WORLD_SIZE is in the environment, but {name} is not; set both (torchrun does), or unset WORLD_SIZE "
        "to have the ranks started on this machine."
    )
