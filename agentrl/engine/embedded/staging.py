"""A version of the weights on its way in: what is complete is loaded and read back while the rest comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.parameters import (
    LayerParameters,
    OuterParameters,
    Parameters,
    load_layer,
    load_outer,
    named_layer,
    named_outer,
    prefix_of,
)
from agentrl.weights import checksum
from agentrl.weights.checksum import added_up

_OUTER = -1


class Staging:
    """Tensors wait for the others of their layer, and for no longer.

    names: all that will come. checksum: of what the loaded ones hold, read back; where the tensors that came
    have another dtype than `dtype`, they were cast while loading, and it is of what came.
    """

    def __init__(self, architecture: Architecture, dtype: torch.dtype, names: Iterable[str]) -> None:
        self.checksum = 0
        self._architecture, self._dtype = architecture, dtype
        self._layer_of = dict.fromkeys(names, _OUTER)
        for index in range(architecture.num_layers):
            prefix = prefix_of(index)
            self._layer_of |= {name: index for name in self._layer_of if name.startswith(prefix)}
        self._missing = dict.fromkeys(self._layer_of.values(), 0)
        for index in self._layer_of.values():
            self._missing[index] += 1
        self._waiting: dict[int, dict[str, Tensor]] = {index: {} for index in self._missing}
        self._layers: dict[int, LayerParameters] = {}
        self._outer: OuterParameters | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor that has not come before."""
        index = self._layer_of[name]
        self._waiting[index][name] = tensor
        self._missing[index] -= 1
        if not self._missing[index]:
            self._load(index, self._waiting.pop(index))

    def loaded(self) -> Parameters:
        """All of it.

        Raises:
            ValueError: something has not come yet.
        """
        if self._outer is None or self._waiting:
            raise ValueError("not all tensors have come")
        layers = tuple(self._layers[index] for index in range(self._architecture.num_layers))
        return Parameters(self._architecture, self._outer, layers)

    def _load(self, index: int, came: dict[str, Tensor]) -> None:
        if index == _OUTER:
            self._outer = load_outer(self._architecture, came, self._dtype)
            back = named_outer(self._outer)
        else:
            layer = self._layers[index] = load_layer(self._architecture, came, self._dtype, index)
            back = named_layer(self._architecture, layer, self._dtype, index)
        self.checksum = added_up([self.checksum, checksum(self._checked(came, back))])

    def _checked(
        self, came: dict[str, Tensor], back: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in back:
            if name in came:
                yield name, tensor if came[name].dtype == self._dtype else came[name]
