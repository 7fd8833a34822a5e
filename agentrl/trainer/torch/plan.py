"""The plan of the torch trainer's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from agentrl.trainer.plan import Plan
from agentrl.trainer.summary import MUON
from agentrl.types import ScoreRole

WORKER = "agentrl.trainer.torch.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPlan(Plan):
    """Any causal language model.

    num_threads: of torch, in each rank (count). num_ranks: those that compute together (count). fsdp_size:
    ranks that share one replica of each network; None = all (count).
    """

    worker_module: ClassVar[str] = WORKER
    num_threads: int = 1
    num_ranks: int = 1
    fsdp_size: int | None = None

    @property
    def shard_size(self) -> int:
        """Ranks that share one replica of each network (count)."""
        return self.num_ranks if self.fsdp_size is None else self.fsdp_size

    @property
    def opened(self) -> frozenset[ScoreRole]:
        """The roles whose directories are opened: with adapters the reference is the policy without them."""
        is_policy = self.config.lora_rank is not None and self.models.get("ref") == self.models["old"]
        return frozenset(self.models) - ({"ref"} if is_policy else set())

    @property
    def world_size(self) -> int:
        """Ranks (count)."""
        return self.num_ranks

    @property
    def publishes_bf16(self) -> bool:
        """Parameters are float32; with bf16, matrices are cast as they are multiplied."""
        return False

    @property
    def layout_facts(self) -> Mapping[str, int]:
        """The optimizer: each has a state of its own for the weights."""
        return {MUON: int(self.config.optimizer == "muon")}
