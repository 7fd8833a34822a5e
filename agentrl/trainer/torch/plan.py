"""The plan of the torch trainer's one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from agentrl.trainer.launch.phases import report_phase
from agentrl.trainer.launch.rank_plan import RankPlace
from agentrl.trainer.plan import Plan, Worker

WORKER = "agentrl.trainer.torch.worker"
"""The module that the rank imports first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPlan(Plan):
    """Any causal language model, unsharded on one rank. num_threads: of torch (count)."""

    num_threads: int = 1

    @property
    def world_size(self) -> int:
        """One rank."""
        return 1

    @property
    def publishes_bf16(self) -> bool:
        """Parameters are float32; with bf16, matrices are cast as they are multiplied."""
        return False

    @property
    def layout_facts(self) -> Mapping[str, int]:
        """The optimizer: each has a state of its own for the weights."""
        return {"muon": int(self.config.optimizer == "muon")}

    @contextmanager
    def worker(self, place: RankPlace) -> Iterator[Worker]:
        """The worker, with the models of the plan's directories."""
        import torch

        from agentrl.trainer.torch.worker import load_worker

        del place
        torch.set_num_threads(self.num_threads)
        report_phase("loading weights")
        yield load_worker(self)
