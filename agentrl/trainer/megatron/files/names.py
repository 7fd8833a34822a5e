"""Names of the files of a saved network; what they hold: `agentrl.trainer.megatron.files.saving`."""

from __future__ import annotations

from pathlib import Path

from agentrl.trainer.megatron.model.families import Placed

MAIN = "main"
"""The suffix of a parameter's values in fp32, beside those of its means."""


def file_of(placed: Placed) -> str:
    """The file of a parameter's shard, in the folder of its tensor rank."""
    if placed.layer is not None:
        return f"layer-{placed.layer:05d}.safetensors"
    kind = "embedding" if placed.rule.megatron.startswith("embedding.") else "head"
    return f"{kind}.safetensors"


def tensor_folder(folder: Path, rank: int) -> Path:
    """The shards of a tensor rank."""
    return folder / f"tensor-{rank}"


def rank_file(folder: Path, rank: int) -> Path:
    """The parts of the optimizer of a rank."""
    return folder / "optimizer" / f"rank-{rank:05d}.safetensors"
