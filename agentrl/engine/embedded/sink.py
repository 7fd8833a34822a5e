"""New weights on their way into the embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import torch

from agentrl.engine.embedded.architecture import Architecture
from agentrl.engine.embedded.parameters import Parameters
from agentrl.engine.embedded.staging import Staging
from agentrl.errors import EngineError
from agentrl.protocols import Bucket, TensorSpec
from agentrl.weights.codec import views

Install = Callable[[Parameters, int], None]
"""Put new parameters into service under a version; returns when every later token is theirs."""


class EmbeddedSink:
    """Loads tensors beside the ones that serve, as they come, and swaps when they check out."""

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
        with ThreadPoolExecutor(1) as beside:
            staging = Staging(self._architecture, self._dtype, names, beside)
            yield Transaction(manifest, staging, lambda parameters: self._install(parameters, version))


class Transaction:
    """The tensors of one version. install: puts them into service."""

    def __init__(
        self, manifest: Sequence[TensorSpec], staging: Staging, install: Callable[[Parameters], None]
    ) -> None:
        self._missing = {spec.name: spec for spec in manifest}
        self._staging = staging
        self._install = install

    async def put(self, bucket: Bucket) -> None:
        """Take some tensors, and load the layers that are complete with them, beside those that serve.

        Raises:
            EngineError: a tensor is not in the manifest, came before, or its bytes do not add up.
        """
        for spec in bucket.tensors:
            if self._missing.pop(spec.name, None) != spec:
                raise EngineError(f"tensor {spec.name} came twice or differs from the manifest; start again.")
        try:
            self._staging.add(views(bucket))
        except ValueError as error:
            raise EngineError(f"a bucket of weights cannot be read: {error}.") from error

    async def commit(self, checksum: int) -> None:
        """Compare what was loaded, and swap. Runs between two tokens of every request.

        Raises:
            EngineError: tensors are missing or the checksum differs; the old version serves on.
        """
        if self._missing:
            raise EngineError(
                f"{len(self._missing)} tensors did not arrive, {next(iter(self._missing))} among them; "
                "the old version serves on, send all of the manifest before commit."
            )
        got = self._staging.checksum()
        if got != checksum:
            raise EngineError(
                f"the weights arrived damaged (checksum {got}, expected {checksum}); the old version serves "
                "on, send them again."
            )
        self._install(self._staging.loaded())


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
