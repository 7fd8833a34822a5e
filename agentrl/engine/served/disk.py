"""Weights of a model directory on their way into an engine that serves."""

from __future__ import annotations

import asyncio

import torch

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.embedded.loading import open_directory
from agentrl.weights import NamedTensors, checksum, manifest_of, named_weights, pack_buckets

_BUCKET_BYTES = 64 << 20


async def update_from_disk(engine: EmbeddedEngine, directory: str, version: int) -> int:
    """Serve the weights of a directory as `version`; requests that run go on with them. Gives their checksum.

    Raises:
        ModelLoadError: the directory is missing or broken.
        EngineError: it holds another model; the old weights serve on.
    """
    named, expected = await asyncio.to_thread(_loaded, directory)
    async with engine.sink.begin(manifest_of(named), version) as transaction:
        for bucket in pack_buckets(named, _BUCKET_BYTES):
            await transaction.put(bucket)
        await transaction.commit(expected)
    return expected


def _loaded(directory: str) -> tuple[list[tuple[str, torch.Tensor]], int]:
    named: NamedTensors = named_weights(open_directory(directory, torch.float32))
    listed = list(named)
    return listed, checksum(listed)
