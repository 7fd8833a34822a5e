"""The parameters of a network that learn: adapters alone, those that patterns choose, or all; and the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.trainer.config import TrainerConfig

_BASE = ".base_layer"
"""What peft calls the layer that an adapter is added to."""


def freeze(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Have a model learn only what the settings choose, in place: all else of it gets no gradient.

    Raises:
        ConfigError: a pattern is in the name of no parameter, or nothing is left to learn; or see `adapt`.
    """
    if config.lora_rank:
        from agentrl.trainer.torch.adapters import adapt

        adapt(model, config)
        return
    only, frozen = config.only_train_params_name_list, config.freeze_params_name_list
    names = [name for name, _ in model.named_parameters()]
    if unknown := [pattern for pattern in (*only, *frozen) if not _is_any((pattern,), names)]:
        raise ConfigError(
            f"`{unknown[0]}` is in the name of no parameter of {type(model).__name__}; mend it: "
            f"they are named as {names[0]} and {names[-1]} are."
        )
    learning = {name for name in names if (not only or _is_any(only, [name])) and not _is_any(frozen, [name])}
    if not learning:
        raise ConfigError(
            f"freeze_params_name_list leaves nothing of {type(model).__name__} to learn; drop some of it."
        )
    if only or frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in learning)


def compact(model: PreTrainedModel, *, learns: bool = True) -> None:
    """Keep matrices that do not learn in bfloat16, in place, where that loses nothing.

    Autocast multiplies them in bfloat16 anyway. Most published weights are in it; others stay as they are.
    learns: what requires a gradient of the model; otherwise nothing does.
    """
    for matrix in frozen_matrices(model, learns=learns):
        half = matrix.detach().to(torch.bfloat16)
        if torch.equal(half.to(matrix.dtype), matrix):
            matrix.data = half


def frozen_matrices(model: PreTrainedModel, *, learns: bool) -> Iterator[nn.Parameter]:
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


def _is_any(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns for name in names)
