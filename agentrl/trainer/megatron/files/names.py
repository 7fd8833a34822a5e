"""Names of the files of a saved network; what they hold: `agentrl.trainer.megatron.files.saving`."""

from __future__ import annotations

from pathlib import Path

from agentrl.trainer.megatron.model.families import Placed

MAIN = "main"
"""The suffix of a parameter's values in fp32, beside those of its means."""


def shard_file(folder: Path, placed: Placed, rank: int) -> Path:
    """The file of a parameter's shard.

    rank: the tensor rank; of an expert, that among the ranks which hold the experts of a layer together.
    """
    return folder / f"{'tensor' if placed.expert is None else 'experts'}-{rank}" / _file_of(placed)


def rank_file(folder: Path, rank: int) -> Path:
    """The parts of the optimizer of a rank."""
    return folder / "optimizer" / f"rank-{rank:05d}.safetensors"


def _file_of(placed: Placed) -> str:
    if placed.layer is not None:
        return f"layer-{placed.layer:05d}.safetensors"
    kind = "embedding" if placed.rule.megatron.startswith("embedding.") else "head"
    return f"{kind}.safetensors"
