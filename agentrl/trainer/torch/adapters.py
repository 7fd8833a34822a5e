"""Low-rank adapters of a network (LoRA, Hu et al., 2021, arXiv:2106.09685), by peft.

The weights stay as they are; each chosen matrix W learns W + scale B A, where B begins as 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agentrl.errors import ConfigError
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.torch.compact import is_read_by_a_kernel
from agentrl.weights.codec import named_weights
from agentrl.weights.hf.adapters import adapter_names

_NAME = "default"
_BASE = ".base_layer."
_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def adapt(model: PreTrainedModel, config: TrainerConfig) -> PreTrainedModel:
    """Give a model adapters, in place, and freeze all else of it.

    Nothing changes without `lora_rank`, nor where it has them.

    Raises:
        ConfigError: it has no layer of these names.
    """
    if not config.lora_rank or _adapted(model):
        return model
    targets = _targets(model, config.lora_target_modules)
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets)
    # A begins at random: the same in every run of a model.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inject_adapter_in_model(lora, model, adapter_name=_NAME)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(model.dtype)
    return model


def _targets(model: PreTrainedModel, chosen: str) -> list[str]:
    """The matrices to adapt, by their whole names."""
    head = model.get_output_embeddings()
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    linear = {
        name: name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and not is_read_by_a_kernel(model, name)
    }
    if has_experts:
        # peft takes these names for the experts, which are one tensor and stay as they are.
        linear = {name: last for name, last in linear.items() if last not in _OF_EXPERTS}
    names = {name.strip() for name in chosen.split(",")}
    targets = [name for name, last in linear.items() if names == {"all-linear"} or last in names]
    if unknown := names - {"all-linear", *linear.values()}:
        raise ConfigError(
            f"lora_target_modules names {', '.join(sorted(unknown))}, which {type(model).__name__} cannot "
            f"adapt; choose among {', '.join(sorted(set(linear.values())))}, or all-linear."
        )
    return targets


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Have the network as it was before it had any; the reference of a run is that."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(enabled=True)


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """As `named_weights` of the model that it was, with the adapters added to the matrices that they adapt.

    Such a matrix is a copy, made as the iterator reaches it.
    """
    return named_weights(model, _own(model), partial(_merged, _adapted(model)))


def adapter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The adapters alone, by the names that files of them have; one that ranks share as `named_weights`."""
    for name, layer in _adapted(model).items():
        pair = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        for named, tensor in zip(adapter_names(name.removesuffix(".weight")), pair, strict=True):
            assert isinstance(tensor, Tensor), "half of an adapter"
            yield named, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _adapted(model: PreTrainedModel) -> dict[str, Linear]:
    """The layers with adapters, by the names of their matrices."""
    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, Linear)}


def _own(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's state without the adapters, by the names that it had."""
    state = model.state_dict().items()
    return {name.replace(_BASE, "."): tensor for name, tensor in state if ".lora_" not in name}


@torch.no_grad()
def _merged(adapted: Mapping[str, Linear], name: str, tensor: Tensor) -> Tensor:
    # What does not learn may be in bfloat16, see `compact`.
    whole = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    layer = adapted.get(name)
    if layer is None:
        return whole
    delta: Tensor = layer.get_delta_weight(_NAME)
    return whole + delta.to(whole.dtype)
