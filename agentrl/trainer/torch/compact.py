"""Matrices that do not learn, in half of their memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_BASE = ".base_layer"
"""What peft calls the layer that an adapter is added to."""


def compact(model: PreTrainedModel, *, learns: bool = True) -> None:
    """Keep matrices that do not learn in bfloat16, in place, where that loses nothing.

    Autocast multiplies them in bfloat16 anyway. Most published weights are in it; others stay as they are.
    learns: what requires a gradient of the model; otherwise nothing does.
    """
    for matrix in frozen_matrices(model, learns=learns):
        half = matrix.detach().to(torch.bfloat16)
        if torch.equal(half.to(matrix.dtype), matrix):
            matrix.data = half


def frozen_matrices(model: PreTrainedModel, *, learns: bool) -> Iterator[Tensor]:
    """The matrices of linear layers that do not learn, see `compact`, and that nothing else reads."""
    embeddings = model.get_input_embeddings()
    others = {id(p) for p in embeddings.parameters()} if isinstance(embeddings, nn.Module) else set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not is_read_by_a_kernel(model, name):
            weight = module.weight
            if not (learns and weight.requires_grad) and id(weight) not in others:
                yield weight


def is_read_by_a_kernel(model: PreTrainedModel, name: str) -> bool:
    """Whether a kernel of a recurrent layer takes this layer's matrix itself, and passes the layer by."""
    parent, _, last = name.removesuffix(_BASE).rpartition(".")
    return last == "out_proj" and hasattr(model.get_submodule(parent), "conv1d")
