"""New weights on their way into the embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import torch
from torch import Tensor

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.parameters import Parameters
from agentrl.errors import EngineError
from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights import checksum, unpack

Install = Callable[[Parameters, int], None]
"""Put new parameters into service under a version; returns when every later token is theirs."""


class EmbeddedSink:
    """Stages tensors, loads them beside the ones that serve, and swaps when they check out."""

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
        yield Transaction(manifest, lambda staged, expected: self._swap(staged, expected, version))

    def _swap(self, staged: Mapping[str, Tensor], expected: int, version: int) -> None:
        parameters = Parameters.load(self._architecture, staged, self._dtype)
        loaded = ((name, tensor) for name, tensor in parameters.named() if name in staged)
        # Weights of another dtype were cast while loading: of those only the arrival can be checked.
        got = checksum(
            (name, tensor if staged[name].dtype == self._dtype else staged[name]) for name, tensor in loaded
        )
        if got != expected:
            raise EngineError(
                f"the weights of version {version} arrived damaged (checksum {got}, expected {expected}); "
                "the old version serves on, send them again."
            )
        self._install(parameters, version)


class Transaction:
    """The tensors of one version, staged until commit."""

    def __init__(
        self, manifest: Sequence[TensorSpec], swap: Callable[[Mapping[str, Tensor], int], None]
    ) -> None:
        self._missing = {spec.name: spec for spec in manifest}
        self._swap = swap
        self._staged: dict[str, Tensor] = {}

    async def put(self, bucket: Bucket) -> None:
        """Stage some tensors.

        Raises:
            EngineError: a tensor is not in the manifest, came before, or its bytes do not add up.
        """
        for spec in bucket.tensors:
            if self._missing.pop(spec.name, None) != spec:
                raise EngineError(f"tensor {spec.name} came twice or differs from the manifest; start again.")
        try:
            self._staged.update(unpack(bucket))
        except ValueError as error:
            raise EngineError(f"a bucket of weights cannot be read: {error}.") from error

    async def commit(self, checksum: int) -> None:
        """Load, compare, swap. Runs between two tokens of every request.

        Raises:
            EngineError: tensors are missing or the checksum differs; the old version serves on.
        """
        if self._missing:
            raise EngineError(
                f"{len(self._missing)} tensors did not arrive, {next(iter(self._missing))} among them; "
                "the old version serves on, send all of the manifest before commit."
            )
        self._swap(self._staged, checksum)


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
