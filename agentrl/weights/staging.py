"""Staging of one version of the weights until all tensors have arrived; every engine's sink uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.errors import EngineError
from agentrl.types.seams import Bucket, TensorSpec


class StagingArea(Protocol):
    """Holds the tensors of a version that does not serve yet."""

    async def add(self, bucket: Bucket) -> None:
        """Stage tensors that have not been staged before.

        Raises:
            ValueError: the bytes do not add up to the tensors, or a dtype is unknown.
        """

    async def checksum(self) -> int:
        """The checksum of all staged tensors, computed from the engine's copy."""

    async def install(self) -> None:
        """Serve the staged tensors."""


class Transaction:
    """Checks the tensors of one version, adds them to a staging area, and commits them into service."""

    def __init__(self, manifest: Sequence[TensorSpec], version: int, staging: StagingArea) -> None:
        self._missing = {spec.name: spec for spec in manifest}
        self._version = version
        self._staging = staging

    async def put(self, bucket: Bucket) -> None:
        """Stage some tensors.

        Raises:
            EngineError: a tensor is not in the manifest, was sent before, or its bytes do not add up.
        """
        for spec in bucket.tensors:
            if self._missing.pop(spec.name, None) != spec:
                raise EngineError(f"tensor {spec.name} came twice or differs from the manifest; start again.")
        try:
            await self._staging.add(bucket)
        except ValueError as error:
            raise EngineError(f"a bucket of weights cannot be read: {error}.") from error

    async def commit(self, checksum: int) -> None:
        """Compare the staged tensors with the sender's checksum, and put them into service.

        Raises:
            EngineError: tensors are missing, the checksum differs, or the engine rejected them; the engine
                keeps serving the old version.
        """
        if self._missing:
            raise EngineError(
                f"{len(self._missing)} tensors did not arrive, {next(iter(self._missing))} among them; "
                "the old version stays in service, send all of the manifest before commit."
            )
        staged = await self._staging.checksum()
        if staged != checksum:
            raise EngineError(
                f"the weights of version {self._version} arrived damaged (checksum {staged}, expected "
                f"{checksum}); the old version stays in service, send them again."
            )
        await self._staging.install()
