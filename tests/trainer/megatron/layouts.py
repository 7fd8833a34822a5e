"""Layouts of four ranks, by their options: every two options that go together do so in some case."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod

from tests.pairwise import Case, covering
from tests.trainer.megatron.models import MIXTURES

RANKS = 4
REPLICAS = "replicas"
SPLITS = {
    "tensor_model_parallel_size": "TP2",
    "pipeline_model_parallel_size": "PP2",
    "context_parallel_size": "CP2",
}
OPTIONS: dict[str, tuple[Hashable, ...]] = {
    **dict.fromkeys(SPLITS, (1, 2)),
    REPLICAS: (1, 2),
    "sequence_parallel": (False, True),
    "num_virtual_stages_per_pipeline_rank": (1, 2),
    "decoder_last_pipeline_num_layers": (None, 1),
    "expert_model_parallel_size": (1, 2),
    "expert_tensor_parallel_size": (1, 2),
}
SHORT = {
    **SPLITS,
    REPLICAS: "DP2",
    "sequence_parallel": "SP",
    "num_virtual_stages_per_pipeline_rank": "virtual",
    "decoder_last_pipeline_num_layers": "uneven",
    "expert_model_parallel_size": "EP2",
    "expert_tensor_parallel_size": "ETP2",
}


def is_layout(case: Case) -> bool:
    """Whether four ranks can be laid out so."""
    ranks = prod(case[name] for name in (*SPLITS, REPLICAS))
    tensor, pipeline = case["tensor_model_parallel_size"], case["pipeline_model_parallel_size"]
    sequence, virtual = case["sequence_parallel"], case["num_virtual_stages_per_pipeline_rank"]
    is_uneven = case["decoder_last_pipeline_num_layers"] is not None
    experts = case["expert_model_parallel_size"] * case["expert_tensor_parallel_size"]
    if case.get("kind") in MIXTURES:
        fits = RANKS // pipeline % experts == 0 and (tensor == 1 or sequence)
    else:
        fits = experts == 1
    fits = fits and (not is_uneven or (pipeline > 1 and virtual == 1))
    return fits and ranks == RANKS and (tensor > 1 or not sequence) and (pipeline > 1 or virtual == 1)


def covering_layouts(**more: Sequence[Hashable]) -> dict[str, Case]:
    """Cases of a layout and further factors in which every pair of choices stands, by name."""
    return {name_of(case): case for case in covering(OPTIONS | more, is_layout)}


def sizes_of(case: Case) -> dict[str, Hashable]:
    """The layout's settings alone; the replicas follow from them."""
    return {name: case[name] for name in OPTIONS if name != REPLICAS}


def name_of(case: Case) -> str:
    """A case as a test id: "TP2 CP2 SP, gspo, token mean"."""
    layout = " ".join(word for name, word in SHORT.items() if case[name] != OPTIONS[name][0])
    return ", ".join([layout, *(str(value) for name, value in case.items() if name not in OPTIONS)])
