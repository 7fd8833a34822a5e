"""Ranks of Megatron for the jobs: started ahead, given a plan once they may use the card."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from agentrl.errors import TrainerError
from agentrl.losses import PolicyLoss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.plan import WORKER, MegatronPlan
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.types import JSON

_STEPS = 1_000_000
_ATTENTION = re.compile(r"attention: (.*)")


class Ranks:
    """Processes that import what a rank needs from now on. logs: the folder of rank-0.log."""

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self.logs = folder / f"ranks-{uuid.uuid4().hex[:6]}"
        self.processes = Processes(count, self.logs, preloaded=WORKER)

    @property
    def attention(self) -> str:
        """What the rank says of its attention."""
        return next(reversed(_ATTENTION.findall(self.log)), "?")

    @property
    def log(self) -> str:
        """The output of rank 0."""
        return (self.logs / "rank-0.log").read_text(errors="replace")

    @asynccontextmanager
    async def training(
        self,
        model: Path,
        *,
        rows: int,
        bf16: bool,
        layout: Mapping[str, JSON] | None = None,
        trainer: Mapping[str, JSON] | None = None,
    ) -> AsyncIterator[RankTrainer]:
        """Train the model in this directory during the block, then end the ranks.

        rows: tokens of a micro-batch. layout, trainer: further settings.
        """
        config = TrainerConfig.model_validate(
            {"lr": 1e-6, "max_tokens_per_gpu": rows, "bf16": bf16, **(trainer or {})}
        )
        plan = MegatronPlan(
            layout=MegatronConfig.model_validate({"actor_num_gpus_per_node": self.count, **(layout or {})}),
            policy=Learning(PolicyLoss(), config, _STEPS),
            models={"old": str(model)},
        )
        try:
            yield await RankTrainer.started(self.processes, plan)
        finally:
            self.processes.close()


def is_out_of_memory(error: TrainerError, ranks: Ranks) -> bool:
    """Whether the card was too small for what a rank did."""
    return any("out of memory" in text for text in (str(error).lower(), ranks.log.lower()))
