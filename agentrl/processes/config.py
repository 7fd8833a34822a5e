"""Settings of the cluster: on which machines the ranks, the servers and the players of a run are."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from agentrl.config import Changes, Section

Seconds = Annotated[float, Field(gt=0)]
Cpus = Annotated[float, Field(ge=0.01)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\*?$")]


class ClusterConfig(Section):
    """Whether a run's processes are on this machine, or where Ray places them. Nothing else depends on it."""

    all_change: ClassVar[Changes | None] = Changes.SPEED

    cluster: Literal["local", "ray"] = "local"
    """Where the trainer's ranks, the servers and the players run: child processes on this machine (local), or
    actors on the machines of a Ray cluster (ray)."""
    ray_address: str | None = None
    """Ray cluster to attach to: HOST:PORT of its head, or `auto` for the one that this user runs on this
    machine. Left out, the run starts a Ray of its own on this machine, reachable from it alone, and ends it;
    under `ray job submit` it attaches to the cluster of the job. RAY_ADDRESS alone is ignored."""
    placement_timeout_s: Seconds = 300.0
    """How long the run waits until the cluster has room for all its processes (seconds)."""
    num_cpus_per_rank: Cpus = 1.0
    """CPUs of the cluster that each rank of the trainer takes (count)."""
    num_cpus_per_server: Cpus = 1.0
    """CPUs of the cluster that each SGLang server that the run starts takes (count)."""
    num_gpus_per_rank: Annotated[int, Field(ge=0, le=1)] | None = None
    """GPUs that each rank takes (count); left out, 1 where the cluster has any, else 0."""
    num_cpus_per_rollout_worker: Cpus | None = None
    """CPUs of the cluster that each player takes (count; num_rollout_workers); left out, those of the
    environment's `resources`."""
    ray_env_vars: list[VariableName] = Field(default_factory=list)
    """Environment variables of this process that the ranks, servers and players get, too (a list of names,
    `NCCL_*` for all that begin so; as a flag: JSON). A Ray that the run starts has all of them already."""

    @field_validator("ray_address")
    @classmethod
    def _names_a_cluster(cls, address: str | None) -> str | None:
        # With `local`, Ray would start one that admits everybody, with files that all users can write.
        if address is not None and address != "auto" and ":" not in address:
            raise ValueError(
                f"ray_address = {address} names no cluster; give HOST:PORT of its head, or auto."
            )
        return address

    @property
    def inactive(self) -> dict[str, str]:
        """All settings of Ray, where the run is on this machine alone."""
        others = () if self.cluster == "ray" else set(ClusterConfig.model_fields) - {"cluster"}
        return dict.fromkeys(sorted(others), "without cluster = ray; choose it")
