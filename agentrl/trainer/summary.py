"""The summary of a trainer's saved state: trainer.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from agentrl.config import Section
from agentrl.types import ScoreRole

FOLDERS: Mapping[ScoreRole, str] = {"old": "policy", "values": "critic", "ref": "reference"}
"""The folder of each network that changes."""

MUON = "muon"
"""Which optimizer it is: the one fact of torch's files, and one of Megatron's where it is set."""

Dtype = Literal["float32", "bfloat16"]


class RankLayout(NamedTuple):
    """What the files of Megatron's ranks depend on: sizes (count), and whether ranks share an optimizer."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    num_virtual_stages_per_pipeline_rank: int
    context_parallel_size: int
    data_parallel_size: int
    shares_the_optimizer: int
    expert_model_parallel_size: int
    expert_tensor_ranks: int


class SavedDone(Section):
    """An optimizer's steps."""

    steps: int
    """Steps (count)."""
    skipped: int
    """Those that changed no weights (count)."""


class SavedTrainer(Section):
    """The contents of trainer.json."""

    format: Literal[1] = 1
    """The version of this directory's format."""
    dtype: Dtype
    """The dtype of the weights."""
    layout: dict[str, int]
    """The settings that the files depend on, by name."""
    steps: int
    """Updates that the trainer made (count)."""
    done: dict[str, SavedDone]
    """The steps of each network's optimizer."""

    @property
    def is_of_torch(self) -> bool:
        """Whether the torch trainer has saved it; else Megatron."""
        return self.layout.keys() == {MUON}

    @property
    def ranks(self) -> RankLayout:
        """The layout of Megatron's ranks that have saved it."""
        return RankLayout(*(self.layout[name] for name in RankLayout._fields))
