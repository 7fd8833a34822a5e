"""New weights on their way into the embedded engine: layers are loaded as they complete, and read back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager

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
from agentrl.errors import EngineError
from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights import checksum
from agentrl.weights.checksum import sum_digests
from agentrl.weights.codec import views
from agentrl.weights.staging import Transaction

_Named = Iterable[tuple[str, Tensor]]

Install = Callable[[Parameters, int], None]
"""Put new parameters into service under a version; returns when every later token is theirs."""


class EmbeddedSink:
    """Loads tensors as they come, while the old ones serve, and swaps when the checksum agrees."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype, install: Install) -> None:
        self._architecture = architecture
        self._dtype = dtype
        self._install = install

    @asynccontextmanager
    async def begin(self, manifest: Sequence[TensorSpec], version: int) -> AsyncIterator[Transaction]:
        """Start sending `version`.

        Raises:
            EngineError: the manifest leaves out a tensor, names a strange one or a wrong shape.
        """
        _check_manifest(manifest, self._architecture)
        names = [spec.name for spec in manifest]
        with ThreadPoolExecutor(1) as reader:
            staging = StagedParameters(
                self._architecture,
                self._dtype,
                names,
                reader,
                lambda parameters: self._install(parameters, version),
            )
            yield Transaction(manifest, version, staging)


class StagedParameters:
    """Tensors wait for the others that they are loaded with, a layer's for those of the layer, and no longer.

    names: all that will come. reader: reads back what was loaded, while the next is. install: puts the whole
    into service.
    """

    def __init__(
        self,
        architecture: Architecture,
        dtype: torch.dtype,
        names: Iterable[str],
        reader: Executor,
        install: Callable[[Parameters], None],
    ) -> None:
        self._architecture, self._dtype, self._reader, self._install = architecture, dtype, reader, install
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

    async def add(self, bucket: Bucket) -> None:
        """Take tensors that have not come before. Those that wait are copied, and their memory let go.

        Raises:
            ValueError: the bytes do not add up to the tensors.
        """
        came: dict[str, Tensor] = {}
        for name, tensor in views(bucket):
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
        return sum_digests(summed.result() for summed in self._sums)

    async def install(self) -> None:
        """Swap, between two tokens of every request. All tensors have come."""
        self._install(self._loaded())

    def _loaded(self) -> Parameters:
        assert self._embedding is not None, "all tensors have come"
        assert self._norm is not None, "all tensors have come"
        assert self._head is not None, "all tensors have come"
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
        self._sums.append(self._reader.submit(lambda: checksum(_checked(cast, back))))


def _check_manifest(manifest: Sequence[TensorSpec], architecture: Architecture) -> None:
    wanted = architecture.shapes()
    sent = {spec.name: tuple(spec.shape) for spec in manifest}
    missing = wanted.keys() - sent.keys()
    if missing:
        raise EngineError(
            f"the manifest lacks {len(missing)} tensors, {min(missing)} among them; send them all."
        )
    # A checkpoint may carry tied embeddings under both names.
    allowed = wanted | {"lm_head.weight": wanted["model.embed_tokens.weight"]}
    for name, shape in sent.items():
        if allowed.get(name) != shape:
            raise EngineError(
                f"tensor {name} with shape {shape} does not belong to the served model, "
                f"which expects {allowed.get(name, 'no such tensor')}; send the model it was built from."
            )


def _checked(cast: Mapping[str, Tensor | None], back: _Named) -> Iterator[tuple[str, Tensor]]:
    """What is read back of each tensor that came; where it was cast, what came."""
    for name, tensor in back:
        came = cast[name]
        yield name, tensor if came is None else came
