"""A version of the weights on its way in: what is complete is loaded and read back while the rest comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future

import torch
from torch import Tensor

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.linear import Linear
from agentrl.engine.embedded.norm import RmsNorm
from agentrl.engine.embedded.parameters import (
    EMBEDDING,
    HEAD,
    NORM,
    LayerParameters,
    OuterParameters,
    Parameters,
    load_embedding,
    load_head,
    load_layer,
    load_norm,
    named_layer,
    prefix_of,
)
from agentrl.weights import checksum
from agentrl.weights.checksum import added_up

_Named = Iterable[tuple[str, Tensor]]


class Staging:
    """Tensors wait for the others that they are loaded with, a layer's for those of the layer, and no longer.

    names: all that will come. beside: reads back what was loaded, while the next is.
    """

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, names: Iterable[str], beside: Executor
    ) -> None:
        self._architecture, self._dtype, self._beside = architecture, dtype, beside
        self._sums: list[Future[int]] = []
        # What is loaded together: a layer, by its number, or a tensor outside of them, by its name.
        self._whole_of: dict[str, int | str] = {name: name for name in names}
        if architecture.tied and HEAD in self._whole_of:
            self._whole_of[HEAD] = EMBEDDING
        for index in range(architecture.num_layers):
            prefix = prefix_of(index)
            self._whole_of |= {name: index for name in self._whole_of if name.startswith(prefix)}
        self._missing = dict.fromkeys(self._whole_of.values(), 0)
        for whole in self._whole_of.values():
            self._missing[whole] += 1
        self._waiting: dict[int | str, dict[str, Tensor]] = {whole: {} for whole in self._missing}
        self._layers: dict[int, LayerParameters] = {}
        self._embedding: Tensor | None = None
        self._norm: RmsNorm | None = None
        self._head: Linear | None = None

    def add(self, named: _Named) -> None:
        """Take tensors that have not come before. Those that wait are copied, and their memory let go."""
        came: dict[str, Tensor] = {}
        for name, tensor in named:
            whole = self._whole_of[name]
            came[name] = self._waiting[whole][name] = tensor
            self._missing[whole] -= 1
            if not self._missing[whole]:
                self._load(whole, self._waiting.pop(whole))
        for waiting in self._waiting.values():
            waiting |= {name: tensor.clone() for name, tensor in waiting.items() if name in came}

    def checksum(self) -> int:
        """Of what the loaded ones hold, read back.

        Where the tensors that came have another dtype than `dtype`, they were cast while loading, and it is
        of what came.
        """
        return added_up(summed.result() for summed in self._sums)

    def loaded(self) -> Parameters:
        """All of it.

        Raises:
            ValueError: something has not come yet.
        """
        if self._waiting or self._embedding is None or self._norm is None or self._head is None:
            raise ValueError("not all tensors have come")
        outer = OuterParameters(self._embedding, self._norm, self._head)
        layers = tuple(self._layers[index] for index in range(self._architecture.num_layers))
        return Parameters(self._architecture, outer, layers)

    def _load(self, whole: int | str, came: Mapping[str, Tensor]) -> None:
        if isinstance(whole, int):
            layer = self._layers[whole] = load_layer(self._architecture, came, self._dtype, whole)
            self._read_back(came, named_layer(self._architecture, layer, self._dtype, whole))
        elif whole == EMBEDDING:
            self._load_embedding(came)
        elif whole == NORM:
            norm = self._norm = load_norm(self._architecture, came, self._dtype)
            self._read_back(came, [(NORM, norm.weight.to(self._dtype))])
        else:
            head = self._head = load_head(came, self._dtype)
            self._read_back(came, ((HEAD, one.dense()) for one in [head]))

    def _load_embedding(self, came: Mapping[str, Tensor]) -> None:
        embedding = self._embedding = load_embedding(came, self._dtype)
        self._read_back(came, [(EMBEDDING, embedding)])
        if self._architecture.tied:
            head = self._head = Linear(embedding)
            if HEAD in came:
                self._read_back(came, ((HEAD, one.dense()) for one in [head]))

    def _read_back(self, came: Mapping[str, Tensor], back: _Named) -> None:
        cast = {name: None if tensor.dtype == self._dtype else tensor for name, tensor in came.items()}
        self._sums.append(self._beside.submit(lambda: checksum(_checked(cast, back))))


def _checked(cast: Mapping[str, Tensor | None], back: _Named) -> Iterator[tuple[str, Tensor]]:
    """What is read back of each tensor that came; where it was cast, what came."""
    for name, tensor in back:
        came = cast[name]
        yield name, tensor if came is None else came
