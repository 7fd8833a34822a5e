"""Functions that Megatron's ranks call by their paths."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel


def note(line: str) -> None:
    """Keep a line of this rank."""
    rank = torch.distributed.get_rank()
    with (Path(os.environ["AGENTRL_TEST_NOTES"]) / f"{rank}.txt").open("a") as file:
        file.write(f"{line}\n")


def begun(layout):
    assert parallel_state.model_parallel_is_initialized()
    note(f"init {layout.tensor_model_parallel_size}")


class Noted(GPTModel):
    """Megatron's model under another name."""


def noted_model(**arguments):
    note(f"model of {arguments['transformer_layer_spec'].layer_norm.__name__}")
    return Noted(**arguments)


def other_model(**arguments):
    return torch.nn.Linear(1, 1)


@torch.no_grad()
def even(role, stages):
    """The last norm gives zeros, so every token of the vocabulary is as likely as any other."""
    note(f"score {role}")
    for stage in stages:
        stage.decoder.final_layernorm.weight.zero_()


def steps(role, stages):
    note(f"step {role} {sum(p.numel() for stage in stages for p in stage.parameters()) > 0}")


def stepped(role, stages):
    note(f"stepped {role} {sum(p.numel() for stage in stages for p in stage.parameters()) > 0}")


def saves(role, stages):
    note(f"saves {role} {len(stages)}")


def mistaken(role, stages):
    raise KeyError("nothing of that name")
