"""What the sections of the trainer's benchmark share: the model's folder, and trainers that learn it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from agentrl.losses import PolicyLoss
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch import TorchTrainer
from agentrl.types import JSON, TrainBatch
from benchmarks.compare import Compared, Side
from benchmarks.models import save, seeded, tokenizer_of
from benchmarks.sections import ResultRow
from benchmarks.trainer.settings import TrainerBench

OURS = "agentrl"


@dataclass(frozen=True, slots=True)
class TrainerContext:
    """folder: for models and logs. trl: the interpreter that TRL is installed for, or None."""

    folder: Path
    bench: TrainerBench
    trl: Path | None
    on_event: Callable[[str], None]

    def model(self) -> PreTrainedModel:
        """The model, always with the same weights."""
        return seeded(self.bench.make)

    def saved(self) -> Path:
        """Its directory."""
        folder = self.folder / "model"
        return folder if folder.exists() else save(self.model(), folder)

    def updating(self, batch: TrainBatch) -> Side:
        """A side that takes a step of ours over a batch."""
        model = self.model()
        config = TrainerConfig(lr=1e-5, max_tokens_per_gpu=self.bench.row_tokens)
        trainer = TorchTrainer(model, PolicyLoss(), config, tokenizer=tokenizer_of(model), total_steps=1)

        async def update() -> None:
            await trainer.update(batch)

        return update

    def row(
        self, name: str, result: Compared, target: float, *, unit: str = "tokens/s", **figures: JSON
    ) -> ResultRow:
        """The line of a comparison of two sides, ours first."""
        first, second = result.medians
        ratio = result.medians[first] / result.medians[second]
        line = (
            f"{ratio:.2f}x ({result.medians[first]:,.0f} against {result.medians[second]:,.0f} {unit}), "
            f"target {target}x"
        )
        self.on_event(f"{name}: {line}")
        return ResultRow(name, line, {"ratio": ratio, "target": target, "sides": result.figures, **figures})
