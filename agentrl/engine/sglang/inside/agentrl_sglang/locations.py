"""Where the tensors of a checkpoint are in the parameters of SGLang's models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from .tensors import SentTensor

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Fused parameters of SGLang, and the checkpoint tensors whose rows they stack."""
_EXPERTS = ".experts."


class Model(Protocol):
    """The methods of SGLang's models that are used here."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, by SGLang's names."""

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers, by SGLang's names."""

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Modules, by SGLang's names."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Copy tensors of a checkpoint into the parameters."""


class Locations:
    """Maps checkpoint tensors to slices of a model's parameters. shapes: of the requested tensors."""

    def __init__(self, model: Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._parameters = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        self._modules = dict(model.named_modules())
        self._shapes = shapes

    def check(self, sent: Iterable[SentTensor]) -> None:
        """Check the names and shapes of tensors. Raises ValueError: the model has another."""
        for tensor in sent:
            self.of(tensor)

    def of(self, sent: SentTensor) -> torch.Tensor | None:
        """The slice of a parameter with this tensor; None = an expert's, whose layout is not supported."""
        start, parameter = 0, self._parameters.get(sent.name)
        if parameter is None:
            start, parameter = self._fused(sent.name)
        if parameter is None:
            if _EXPERTS in sent.name:
                return None
            raise ValueError(f"the server's model has no tensor {sent.name}; send the model that it serves")
        part = parameter.detach()[start:] if parameter.dim() else parameter.detach()
        if part.dim() != len(sent.shape) or any(a < b for a, b in zip(part.shape, sent.shape, strict=True)):
            raise ValueError(
                f"{sent.name} came as {sent.shape}, the server's model has {tuple(parameter.shape)}"
            )
        # Vocabularies are padded at their end, and on CPUs every size that is no multiple of 64.
        return part[tuple(slice(size) for size in sent.shape)]

    def _fused(self, name: str) -> tuple[int, torch.Tensor | None]:
        """The fused parameter of a tensor, and its first row there."""
        for fused, parts in _FUSED.items():
            for number, part in enumerate(parts):
                if f".{part}." in name:
                    owner, _, kind = name.replace(f".{part}.", f".{fused}.").rpartition(".")
                    above = [name.replace(f".{part}.", f".{other}.") for other in parts[:number]]
                    # Scales of fp8 have a row for a block of rows.
                    sized = None if kind.startswith("weight_scale") else self._modules.get(owner)
                    return self._start(sized, above), self._parameters.get(f"{owner}.{kind}")
        return 0, None

    def _start(self, owner: torch.nn.Module | None, above: Sequence[str]) -> int:
        """The first row of a tensor in a fused parameter, after the padded rows of the tensors above it."""
        sizes = getattr(owner, "output_partition_sizes", None)
        if isinstance(sizes, list):
            return sum(sizes[: len(above)])
        return sum(self._shapes[other][0] for other in above if other in self._shapes)
