"""A Megatron trainer's saved state, before its ranks write into it."""

from __future__ import annotations

from pathlib import Path

from agentrl.trainer.megatron.files.sharded import About, SavedLayout, begin_directory
from agentrl.trainer.plan import Plan
from agentrl.trainer.saved import FOLDERS, dtype_of


def begin(folder: Path, plan: Plan, *, tensor_ranks: int) -> None:
    """Make a trainer's directory, into which the ranks may write."""
    layout = SavedLayout(tensor_model_parallel_size=tensor_ranks)
    folder.mkdir()
    begin_directory(
        folder / FOLDERS["old"], About(dtype=dtype_of(plan), layout=layout), like=Path(plan.models["old"])
    )
    if plan.critic is not None:
        (folder / FOLDERS["values"]).mkdir()
