"""The plan of Megatron's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.plan import Plan
from agentrl.trainer.summary import MUON, RankLayout

WORKER = "agentrl.trainer.megatron.worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronPlan(Plan):
    """A model that is sharded over the ranks of `layout`."""

    worker_module: ClassVar[str] = WORKER
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
        """The settings that the files of a saved state depend on; Muon's only where it is the optimizer."""
        sizes = {name: int(getattr(self.layout, name)) for name in RankLayout._fields}
        return {**sizes, MUON: 1} if self.config.optimizer == "muon" else sizes
