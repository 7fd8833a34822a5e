"""The trainers under test, and their batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from agentrl.losses import PolicyLoss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.launch.processes import Processes
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.plan import WORKER, MegatronPlan
from agentrl.trainer.plan import Learning
from agentrl.trainer.ranks import RankTrainer
from agentrl.trainer.torch import TorchTrainer
from benchmarks.megatron.settings import MegatronSettings
from benchmarks.models import save, seeded, tokenizer_of

_STEPS = 1_000_000
_VISIBLE = "CUDA_VISIBLE_DEVICES"
TWO_RANK_LAYOUTS: dict[str, dict[str, int]] = {
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
    "DP2": {},
}


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """A model and the settings of both trainers. row_tokens: of a micro-batch."""

    name: str
    make: Callable[[], PreTrainedModel]
    row_tokens: int

    @property
    def config(self) -> TrainerConfig:
        """The settings of both trainers."""
        return TrainerConfig(lr=1e-5, max_tokens_per_gpu=self.row_tokens)


@dataclass(frozen=True, slots=True)
class MegatronContext:
    """folder: for models and logs. on_event: called with a message for each step."""

    folder: Path
    settings: MegatronSettings
    on_event: Callable[[str], None]

    @contextmanager
    def megatron_trainer(self, setup: TrainerSetup, *, ranks: int = 1, **sizes: int) -> Iterator[RankTrainer]:
        """The Megatron trainer over `ranks` processes, one thread each."""
        model = self.folder / setup.name
        if not model.exists():
            save(seeded(setup.make), model)
        plan = MegatronPlan(
            layout=MegatronConfig.model_validate({"actor_num_gpus_per_node": ranks, **sizes}),
            policy=Learning(PolicyLoss(), setup.config, _STEPS),
            models={"old": str(model)},
        )
        with on_the_cpu():
            processes = Processes(plan.world_size, self.folder / "ranks", preloaded=WORKER)
        try:
            yield RankTrainer(processes, plan)
        finally:
            processes.close()


def torch_trainer(setup: TrainerSetup) -> TorchTrainer:
    """The torch trainer, in this process."""
    network = seeded(setup.make)
    return TorchTrainer(
        network, PolicyLoss(), setup.config, tokenizer=tokenizer_of(network), total_steps=_STEPS
    )


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Hide all GPUs from processes that are started in the block: a rank uses any visible GPU.

    This process may have initialized CUDA before; its view does not change.
    """
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ""
    try:
        yield
    finally:
        os.environ.pop(_VISIBLE, None)
        if before is not None:
            os.environ[_VISIBLE] = before
